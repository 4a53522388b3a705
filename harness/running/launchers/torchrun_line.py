"""Reads from a torchrun command line, and from the environment, how many ranks, nodes and restarts the user wants.

The options, their abbreviations and the variables are those of torch.distributed.run. Words after the script belong to
the trainer, even if they look like torchrun's options."""

from __future__ import annotations

import itertools
import re
import shutil
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from torchaos.harness.interfaces import JobSpec
from torchaos.harness.protocol.wire import ENV_NODE, ENV_RUN_ID

RENDEZVOUS_PORT = 29400


def elastic_env(index: int, spec: JobSpec, host: str, name: str, device: str | None = None) -> dict[str, str]:
    """The environment of torchrun on the node `index`. Variables PET_* are the defaults of torchrun's options. A
    variable of the user is kept, but `is_host` is added to PET_RDZV_CONF if it is missing. `host`: the node that serves
    the rendezvous. `name`: this node. `device`: its network device; None: gloo and NCCL find the device from `name`."""
    is_host, conf = f"is_host={int(index == 0)}", spec.env.get("PET_RDZV_CONF", "")
    ours = {
        "PET_NNODES": str(spec.nodes),
        "PET_NODE_RANK": str(index),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{host}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": f"{spec.env[ENV_RUN_ID]}-{spec.submission}",
        "PET_LOCAL_ADDR": name,
        **({"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": device} if device else {}),
    }
    ours = {name: value for name, value in ours.items() if name not in spec.env}
    whole = conf if "is_host" in conf else ",".join(filter(None, (is_host, conf)))
    return {**ours, ENV_NODE: str(index), "PET_RDZV_CONF": whole}


# Programs that start a container.
_CONTAINERS = (
    "apptainer",
    "singularity",
    "enroot",
    "docker",
    "podman",
    "podman-hpc",
    "shifter",
    "charliecloud",
    "ch-run",
)
NO_SCRIPT = frozenset({"--", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"})
_SWITCHES = NO_SCRIPT | {"--standalone", "--use-env", "--use_env", "--virtual-local-rank", "--virtual_local_rank"}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(None, message)


def world_of(command: Sequence[str], env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The ranks per node, and the (smallest) number of nodes. None for a value that is not a number. By default,
    torchrun starts one rank on one node."""
    found = _asked(command, env)
    return (_number(found.ranks), _number(found.nodes.partition(":")[0])) if found else (None, None)


def most_nodes(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """The largest number of nodes that take part; further nodes wait as standby nodes. None if the command gives no
    number."""
    found = _asked(command, env)
    return _number(found.nodes.rpartition(":")[2]) if found else None


def ranks_in_words(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The ranks per node as written in the command, such as `gpu`. Empty if not known."""
    found = _asked(command, env)
    return str(found.ranks) if found else ""


def restarts_of(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """How often torchrun restarts the ranks. None if not known."""
    found = _asked(command, env)
    return _number(found.restarts) if found else None


def options_of(command: Sequence[str]) -> list[tuple[str, str]]:
    """torchrun's own options and their values, such as ("rdzv-endpoint", "h0:29500"). The value of a switch is empty.
    The list is empty if the command does not run torchrun."""
    part = own_part(command)
    own = command[part[0] : part[1]] if part else ()
    found: list[tuple[str, str]] = []
    for word in own:
        if word.startswith("-"):
            name, _, value = word.lstrip("-").partition("=")
            found.append((name.replace("_", "-"), value))
        elif found and not found[-1][1]:
            found[-1] = (found[-1][0], word)
    return found


_OWN_STORES_FROM = (2, 13)  # from then on, torchrun starts a job of one node as with --standalone


def keeps_one_store(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether all attempts use one store, in which they find the addresses of the attempt before, whatever
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE says. This is so with torchrun's static rendezvous (its static_tcp_rendezvous.py)
    and torch 2.5 to 2.12. That rendezvous is the default if a port, an endpoint or several nodes are given."""
    options = {name.upper().replace("-", "_"): value for name, value in options_of(command)}
    options = {**{name[4:]: value for name, value in env.items() if name.startswith("PET_")}, **options}
    if not options_of(command) or "STANDALONE" in options or options.get("RDZV_BACKEND", "static") != "static":
        return False
    if options.keys() & {"MASTER_PORT", "RDZV_ENDPOINT"} or most_nodes(command, env) != 1:
        return True
    version = _torch_of(command[0], env)
    return version is not None and (2, 5) <= version < _OWN_STORES_FROM


def _torch_of(program: str, env: Mapping[str, str]) -> tuple[int, int] | None:
    """The version of the torch that is installed beside a program. None if it is not known."""
    found = shutil.which(program, path=env.get("PATH"))
    installed = Path(found).parent.parent.glob("lib/python3*/site-packages/torch-*.dist-info") if found else ()
    versions = (re.match(r"torch-(\d+)\.(\d+)", folder.name) for folder in installed)
    return next(((int(one[1]), int(one[2])) for one in versions if one), None)


def own_part(command: Sequence[str]) -> tuple[int, int] | None:
    """The begin and end of torchrun's own options among the words. None if the command does not run torchrun."""
    first = _place_of(command)
    return (first + 1, first + 1 + len(_own(command[first + 1 :]))) if first is not None else None


def container_in(command: Sequence[str]) -> str:
    """The program in the command that starts a container, such as apptainer, or the option with which Slurm starts one.
    Empty if there is none."""
    first = next((n for n, word in enumerate(command) if _is_torchrun(word) or word.endswith(".py")), len(command))
    for word in command[:first]:
        if word.rpartition("/")[2] in _CONTAINERS:
            return word.rpartition("/")[2]
        if word.startswith("--container-image"):  # pyxis
            return "srun --container-image"
    return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _asked(command: Sequence[str], env: Mapping[str, str]) -> Namespace | None:
    """The `ranks` per node, the `nodes` (such as 1:3) and the `restarts`, as text, from the command or the environment.
    None if the command does not run torchrun."""
    first = _place_of(command)
    if first is None:
        return None
    parser = _Parser(add_help=False)
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", dest="ranks", default=env.get("PET_NPROC_PER_NODE", "1")
    )
    parser.add_argument("--nnodes", dest="nodes", default=env.get("PET_NNODES", "1"))
    parser.add_argument("--max-restarts", "--max_restarts", dest="restarts", default=env.get("PET_MAX_RESTARTS", "0"))
    try:
        found, _rest = parser.parse_known_args(_own(command[first + 1 :]))
    except ArgumentError:
        return None
    return found


def _place_of(command: Sequence[str]) -> int | None:
    """The index of the word torchrun, or of its module. None if there is none, or if the word is the value of another
    program's option. The word must come before any script, or after scripts that start it and before a script of its
    own."""
    before = len(list(itertools.takewhile(lambda word: not word.endswith(".py"), command)))
    found = (n for n, word in enumerate(command) if _is_torchrun(word))
    return next(
        (
            n
            for n in found
            if (not n or command[n - 1] != "--launcher")
            and (n < max(before, 4) or any(map(_names_script, command[n + 1 :])))
        ),
        None,
    )


def _is_torchrun(word: str) -> bool:
    return word.endswith("torchrun") or word.startswith("torch.distributed.")


def _own(words: Sequence[str]) -> Sequence[str]:
    """torchrun's own words, without the script or module and its arguments. They end at the first word that is neither
    an option nor the value of an option. A word *.py is never a value: the option before it may be an unknown
    switch."""
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] != "--":
        is_whole = "=" in words[end] or words[end] in _SWITCHES
        end += 1
        if not is_whole and end < len(words) and not words[end].startswith("--") and not words[end].endswith(".py"):
            end += 1
    return words[:end]


def script_of(command: Sequence[str]) -> str | None:
    """The Python script that torchrun or Python runs. None if they run a module, or if this is not known."""
    place = _place_of(command)
    after = 1 if place is None else place + 1
    if after == 1 and "python" not in command[0].rpartition("/")[2] and not _is_torchrun(command[0]):
        return None
    first = next(filter(_names_script, command[after:]), None)
    return None if first in NO_SCRIPT else first


def _names_script(word: str) -> bool:
    """Whether the word is a script of Python, or says that a module or another program comes."""
    return word in NO_SCRIPT or word.endswith(".py")
