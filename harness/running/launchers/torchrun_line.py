"""How many ranks, nodes and restarts a torchrun command line asks for.

The options, their abbreviations and the environment are torch.distributed.run's; what follows the script is the
trainer's own, whatever it is called.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import NoReturn

# What torchrun's own options end with, where it is not a script named *.py.
_ENDS = frozenset({"--", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"})


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(None, message)


def world_of(command: Sequence[str], env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Ranks per node and (least) nodes; None where it does not say a number. Without a word of it torchrun starts one
    rank on one node."""
    found = _asked(command, env)
    return (_number(found.ranks), _number(found.nodes.partition(":")[0])) if found else (None, None)


def most_nodes(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """How many nodes take part at most: any beyond these waits. None where it does not say a number."""
    found = _asked(command, env)
    return _number(found.nodes.rpartition(":")[2]) if found else None


def ranks_in_words(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Ranks per node as they are written, such as gpu; empty where it can't be told."""
    found = _asked(command, env)
    return str(found.ranks) if found else ""


def restarts_of(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """How often torchrun starts the ranks again; None where it can't be told."""
    found = _asked(command, env)
    return _number(found.restarts) if found else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _asked(command: Sequence[str], env: Mapping[str, str]) -> Namespace | None:
    """`ranks` per node, `nodes` (say 1:3) and `restarts`, as text; None where it can't be told."""
    first = next((n for n, word in enumerate(command[:4]) if _is_torchrun(word)), None)
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


def _is_torchrun(word: str) -> bool:
    return word.endswith("torchrun") or word.startswith("torch.distributed.")


def _own(words: Sequence[str]) -> Sequence[str]:
    """Without the script, or module, and its arguments."""
    ends = (n for n, word in enumerate(words) if word in _ENDS or word.endswith(".py"))
    return words[: next(ends, len(words))]


def script_of(command: Sequence[str]) -> str | None:
    """The Python script that torchrun, or Python itself, runs; None where it is a module, or can't be told."""
    after = next((n + 1 for n, word in enumerate(command[:4]) if _is_torchrun(word)), 1)
    if after == 1 and "python" not in command[0].rpartition("/")[2] and not _is_torchrun(command[0]):
        return None
    first = next((word for word in command[after:] if word in _ENDS or word.endswith(".py")), None)
    return None if first in _ENDS else first
