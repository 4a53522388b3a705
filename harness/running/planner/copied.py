"""Finds in a command line what was copied from a script: variables that no shell fills in here, programs that start the
ranks on other machines, and torchrun's options that differ from node to node.

Output: problems as clauses, each with what to do. A job with an error can't start; a job with a warning may not be the
one that is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torchaos.harness import registry
from torchaos.harness.running.launchers.torchrun_line import container_in, options_of, world_of

_VARIABLE = re.compile(r"\$(\w+|\{\w+[^}]*\}|\(.*)|`.*")
_STARTS = ("srun", "mpirun", "mpiexec", "prun", "ibrun", "jsrun")  # start ranks where torchaos does not see them
_SUBMITS = ("sbatch", "bsub", "qsub")  # come back before the job begins
_OF_A_NODE = ("node-rank", "master-addr", "master-port", "rdzv-endpoint")


def errors_in(command: Sequence[str], env: Mapping[str, str], launcher: str, nodes: int) -> Iterator[str]:
    """Why the job can't start. `nodes`: how many the launcher makes. `env`: the complete environment."""
    program = command[0].rpartition("/")[2]
    sets = registry.find("launchers", launcher).sets_rendezvous
    if program in _SUBMITS:
        yield f"{program} only submits the job; `torchaos init -- {program} SCRIPT` reads the script"
    if program in _STARTS and sets:
        yield f"launcher: {launcher} itself starts the command on each node; leave {program} and its options out"
    for option, value in options_of(command):
        if found := _VARIABLE.search(value):
            remedy = "leave it out, the launcher sets it" if sets and _is_given(option) else "write the value"
            yield f"no shell reads the command, so --{option} is the text {found[0]}; {remedy}"
    if not sets:
        return
    asked = world_of(command, env)[1] if "nnodes" in dict(options_of(command)) else None
    if asked and asked > nodes:
        instead = f"write --nnodes {nodes}, or job.nodes: {asked}"
        yield f"torchrun waits for {asked} nodes (--nnodes), and the job has {nodes}; {instead}"
    if nodes > 1 and "standalone" in dict(options_of(command)):
        yield "with --standalone, the torchrun of each node runs a job of its own; leave it out"


def warnings_in(command: Sequence[str], launcher: str) -> Iterator[str]:
    """What the job probably does not do as it is meant."""
    program = command[0].rpartition("/")[2]
    sets, options = registry.find("launchers", launcher).sets_rendezvous, dict(options_of(command))
    if program in _STARTS and not sets:
        why = "are no children of torchaos, which can't watch them"
        yield f"the ranks that {program} starts {why}; begin the command with torchrun"
    if head := container_in(command):
        yield (
            f"the ranks run in a container of {head}, which has its own files; start torchaos inside of it, with "
            "torchaos in the image"
        )
    for word in command[1:]:
        if not any(word in (value, f"--{option}={value}") for option, value in options.items()) and (
            found := re.fullmatch(r"(?:--?[\w-]+=)?(\$\w+|\$\{\w+\})(?:/.*)?", word)
        ):
            instead = "write the value, or [bash, -c, '...']"
            yield f"no shell reads the command, so the job gets the text {found[1]}; {instead}"
    if not sets or options.get("rdzv-backend", "c10d") not in ("c10d", "static"):
        return
    given = [f"--{name}" for name in _OF_A_NODE if name in options and "{" not in options[name]]
    given += ["--rdzv-backend static"] if options.get("rdzv-backend") == "static" else []
    if given:
        yield (
            f"every node gets the same {', '.join(given)}, and launcher: {launcher} sets them for each node; leave "
            f"{'them' if len(given) > 1 else 'it'} out"
        )


def _is_given(option: str) -> bool:
    return option in (*_OF_A_NODE, "nnodes") or option.startswith("rdzv-")
