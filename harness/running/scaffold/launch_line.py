"""Turns a command line that starts a job, as a user types it, into torchrun's command line for one node. Programs
before torchrun are removed, other launchers are replaced by torchrun, and options that torchaos sets itself are left
out. `Launch.to_check` lists what could not be kept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import counted
from torchaos.harness.running.launchers.torchrun_line import container_in, own_part, world_of
from torchaos.harness.running.scaffold.batch_script import (
    Batch,
    allocation_of,
    first_program,
    gpus_of,
    is_python,
    nodes_of,
    parse_batch,
    read_batch,
    slurm_options,
    tasks_of,
    with_option,
    without_options,
)
from torchaos.harness.running.scaffold.other_launchers import (
    Launch,
    accelerate,
    composer,
    deepspeed,
    mpirun,
    python,
    starts,
)

_OF_NODES = {  # torchrun's options that torchaos sets, and whether each has a value
    **dict.fromkeys(
        ("node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port",
         "local-addr"), True,
    ), "standalone": False,
}  # fmt: skip
_IN_A_CONTAINER = "start torchaos inside of the container, with torchaos in its image"


def launch_of(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Launch:
    """Turns the command line into torchrun's. Raises UsageError if the line can't be understood, or if it starts the
    ranks where torchaos can't be."""
    launch = Launch(_as_shell_reads(command), cwd, env)
    while handler := _handler(launch.words):
        before = list(launch.words)
        handler(launch)
        if not launch.words:
            raise UsageError(f"{shlex.join(before)}: it starts no program; write the command line of the job")
        if launch.words == before:
            break
    launch.words = [*launch.head, *launch.words]
    if head := container_in(launch.words):
        raise UsageError(f"{head}: the ranks would be in a container without torchaos; {_IN_A_CONTAINER}")
    _torchrun(launch)
    if launch.launcher == "slurm" and own_part(launch.words) is None:
        raise UsageError(
            f"{shlex.join(launch.words)}: it shows no torchrun, which torchaos starts on each node; give init the line "
            "with torchrun, and write launcher: slurm and job.nodes"
        )
    if launch.words != list(command):
        became = shlex.join(launch.words)
        launch.assumed.insert(0, f"torchrun starts the ranks: {shlex.join(command)} became {became}")
    return launch


def _as_shell_reads(command: Sequence[str]) -> list[str]:
    """The words. If only a shell can read them (one word with blanks, or `|`, `>` or `&&` among them): bash with their
    text, of which only the line of the job is read."""
    is_text = len(command) == 1 and " " in command[0]
    if not is_text and not any(_OPERATOR.fullmatch(word) for word in command):
        return list(command)
    quoted = (word if is_text or _OPERATOR.fullmatch(word) else shlex.quote(word) for word in command)
    return ["bash", "-c", " ".join(quoted)]


def _handler(words: Sequence[str]) -> Callable[[Launch], None] | None:
    program = first_program(words)
    if program in _ELSEWHERE:
        raise UsageError(f"{program}: {_ELSEWHERE[program]}")
    if "=" in words[0] and re.match(r"[A-Za-z_]\w*=", words[0]):
        return _variables
    if program in ("accelerate", "accelerate-launch") or (
        is_python(words[0]) and words[1:3] == ["-m", "accelerate.commands.launch"]
    ):
        return accelerate
    if program == "deepspeed" or (is_python(words[0]) and words[1:3] == ["-m", "deepspeed.launcher.runner"]):
        return deepspeed
    if is_python(words[0]) or words[0].endswith(".py"):
        return python
    return _shell if program.endswith(".sh") else _HEADS.get(program)


def _variables(launch: Launch) -> None:
    """`A=1 B=2 torchrun ...`, or the same after `env`."""
    if first_program(launch.words) == "env":
        if launch.words[1:2] == ["-S"]:
            launch.words[1:3] = shlex.split(" ".join(launch.words[2:3]))
        elif launch.words[1:2] and launch.words[1].startswith("-"):
            _wrapper(launch)
            return
        launch.words.pop(0)
    while launch.words and re.match(r"[A-Za-z_]\w*=", launch.words[0]):
        name, _, value = launch.words.pop(0).partition("=")
        launch.adds[name] = value


def _wrapper(launch: Launch) -> None:
    """Keeps a program that runs another, with its options: `uv run`, `nice -n 5`, `env -u NAME`."""
    words = launch.words
    for place in range(1, len(words)):
        is_launcher = starts(words[place]) or first_program(words[place:]) in ("mpirun", "mpiexec")
        if is_launcher and words[place - 1] not in _NAMES_OF_ENVIRONMENTS:
            launch.head += words[:place]
            launch.words = words[place:]
            return


def _sbatch(launch: Launch) -> None:
    given, rest = slurm_options(launch.words[1:])
    launch.launcher = "slurm"
    if "wrap" in given:
        batch, name = parse_batch(given["wrap"], (), launch.env, given), "--wrap"
    elif not rest:
        raise UsageError("sbatch: it names no script; write sbatch SCRIPT")
    else:
        name, path = rest[0], launch.cwd / rest[0]
        try:
            batch = read_batch(path, rest[1:], launch.env, given)
        except OSError as error:
            raise UsageError(f"{path}: it can't be read: {error.strerror}; correct the command") from error
    for option, why in (
        ("container-image", f"the job's container has no torchaos; {_IN_A_CONTAINER}"),
        ("array", "each task of a job array is a job of its own; leave --array out"),
    ):
        if option in batch.options:
            raise UsageError(f"{name}: --{option}={batch.options[option]}: {why}")
    if batch.job is None:
        raise UsageError(f"{name}: no line of it starts torchrun, srun or a script of Python; give that line to init")
    launch.nodes, launch.tasks = nodes_of(batch.options), tasks_of(batch.options)
    launch.gpus, launch.written = gpus_of(batch.options), batch.written
    launch.allocation = allocation_of(batch.options)
    _take(launch, batch.job, batch, name, f", on {counted(launch.nodes, 'node')}")


def _take(launch: Launch, job: tuple[int, list[str]], batch: Batch, name: str, where: str = "") -> None:
    """Puts the line that starts the job, read from a script, in the place of the script. `job`: its number and its
    words."""
    number, launch.words = job
    launch.adds |= batch.exported
    launch.folder = batch.folder if batch.folder and not _LEFT.search(batch.folder) else launch.folder
    launch.assumed.append(f"{name} starts the job in line {number}{where}")
    if len(batch.commands) > 1:
        others = ", ".join(str(line) for line, _ in batch.commands if line != number)
        launch.to_check.append(f"{name} also starts programs in line {others}, which are left out")
    if batch.prepares:
        launch.to_check.append(f"before you start torchaos, do as {name} does: {'; '.join(batch.prepares[:4])}")


def _srun(launch: Launch) -> None:
    options, launch.words = slurm_options(launch.words[1:])
    if "het-group" in options or ":" in launch.words:
        raise UsageError("srun: the parts of a heterogeneous job are not supported; give init the line of one part")
    if image := options.get("container-image") or options.get("container-name"):
        raise UsageError(f"srun --container-image={image}: the container has no torchaos; {_IN_A_CONTAINER}")
    launch.launcher = "slurm"
    inner = {"nodes": str(launch.nodes or 1), **options}
    nodes = options.get("nodes", "").partition("-")[0]
    launch.nodes = int(nodes) if nodes.isdecimal() else launch.nodes or _tasks_alone(options)
    if "ntasks-per-node" in options or "ntasks" in options:
        launch.tasks = tasks_of({**inner, "nodes": str(launch.nodes)})
    launch.gpus = gpus_of(inner) or launch.gpus
    launch.allocation = launch.allocation or allocation_of(options)


def _salloc(launch: Launch) -> None:
    """`salloc -N 2 srun ...`"""
    options, launch.words = slurm_options(launch.words[1:])
    launch.nodes, launch.gpus = nodes_of(options), gpus_of(options)
    launch.tasks, launch.allocation = tasks_of(options), allocation_of(options)


def _tasks_alone(options: Mapping[str, str]) -> int:
    """The number of nodes for `srun --ntasks=4 torchrun`, where each task is a torchrun on a node."""
    count = options.get("ntasks", "1")
    return int(count) if count.isdecimal() else 1


def _shell(launch: Launch) -> None:
    """`bash -c TEXT`, `bash run.sh` and `./run.sh`."""
    words = launch.words[0 if launch.words[0].endswith(".sh") else 1 :]
    first = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    rest = words[first:]
    if any("c" in word for word in words[:first] if not word.startswith("--")) and rest:
        batch = parse_batch(rest[0], rest[2:], launch.env, _as_options(launch))
        if batch.job is not None:
            launch.words = batch.job[1]
            launch.adds |= batch.exported
            launch.folder = batch.folder or launch.folder
    elif rest:
        _script(launch, rest)


def _script(launch: Launch, words: Sequence[str]) -> None:
    """A shell script. Its line that starts the job takes its place, if that line is completely known; otherwise, on one
    machine, the script itself stays the command."""
    try:
        if words[0] in launch.written:
            batch = parse_batch(launch.written[words[0]], words[1:], launch.env, _as_options(launch))
        else:
            batch = read_batch(launch.cwd / words[0], words[1:], launch.env, _as_options(launch))
    except OSError as error:
        if launch.launcher == "slurm" and launch.words[0] != words[0]:
            raise UsageError(f"{words[0]}: it can't be read: {error.strerror}; correct the command") from error
        return  # perhaps a program on the PATH
    if batch.job is None:
        if launch.launcher == "slurm":
            raise UsageError(f"{words[0]}: no line of it starts torchrun or a script of Python; give that line to init")
        return
    left = next(filter(_LEFT.search, [batch.folder, *batch.job[1]]), "") if launch.launcher == "local" else ""
    if left:
        launch.to_check.append(
            f"{words[0]} starts the job in line {batch.job[0]}, and only its shell knows {left}; give that line to "
            "init, with its values"
        )
        return
    _take(launch, batch.job, batch, words[0])


def _as_options(launch: Launch) -> dict[str, str]:
    gpus = {"gpus-per-node": str(launch.gpus)} if launch.gpus else {}
    return {"nodes": str(launch.nodes or 1), "ntasks-per-node": str(launch.tasks), **gpus}


def _plain_head(launch: Launch) -> None:
    """Removes `time` and `nohup`, which do not change the job."""
    while launch.words and (launch.words[0].startswith("-") or first_program(launch.words) in ("time", "nohup")):
        launch.words.pop(0)


def _torchrun(launch: Launch) -> None:
    """Sets the number of ranks per node, and leaves out options that differ from node to node."""
    part = own_part(launch.words)
    if part is None:
        return
    begin, end = part
    per_node, asked = world_of(launch.words, launch.env)
    said = any(re.match(r"--nproc[-_]per[-_]node", word) for word in launch.words[begin:end])
    if ranks := launch.gpus if said and not per_node else None if said else launch.per_node:
        launch.words = with_option(launch.words, begin, end, "nproc-per-node", str(ranks))
        begin, end = own_part(launch.words) or part
    # A loop may call srun once for each node, to start one torchrun.
    launch.nodes = asked or launch.nodes if launch.nodes <= 1 else launch.nodes
    several = launch.launcher == "slurm" or launch.nodes > 1
    if not several:
        return
    names = {**_OF_NODES, "nnodes": True}
    launch.words, dropped = without_options(launch.words, begin, end, names)
    if launch.launcher == "local":
        launch.to_check.append(
            f"the line is that of one of {launch.nodes} nodes, and the draft is for one machine; for more, write "
            "launcher: ssh and job.hosts, or launcher: slurm"
        )
        launch.nodes = 0
    elif dropped:
        launch.assumed.append(f"torchaos sets these for each node: {', '.join(dropped)}")


_BY_ITSELF = (
    "it starts the job on another machine, where torchaos is not; start torchaos inside of its job, with the line"
)
_ELSEWHERE = {
    **dict.fromkeys(
        ("qsub", "bsub", "ray", "sky", "flux", "oarsub", "condor_submit", "jsrun", "aprun", "torchx", "modal", "runai",
         "pyflyte", "flyte", "dstack", "gcloud", "pdsh", "clush"), f"{_BY_ITSELF} of torchrun",
    ),
    **dict.fromkeys(
        ("screen", "tmux", "systemd-run"),
        "it starts the job in the background, where torchaos does not see it; give init the line of torchrun alone",
    ),
    **dict.fromkeys(("kubectl", "helm", "argo"), "write launcher: kubernetes, and the manifest in job.pods"),
    "ssh": "write launcher: ssh, and the machines in job.hosts",
    "horovodrun": "its ranks don't use torch.distributed; torchaos needs torchrun",
}  # fmt: skip
_NAMES_OF_ENVIRONMENTS = ("-n", "--name", "-p", "--prefix", "-e", "--environment")  # conda, pixi
_LEFT = re.compile(r"[$`]")  # in a word that only a shell can fill in
_OPERATOR = re.compile(r"\|\|?|&&?|;|\d?>>?|\d?>&\d|&>>?|<")
_HEADS: dict[str, Callable[[Launch], None]] = {
    "sbatch": _sbatch, "srun": _srun, "salloc": _salloc, "env": _variables, "composer": composer,
    **dict.fromkeys(("time", "nohup"), _plain_head),
    **dict.fromkeys(
        ("uv", "poetry", "pixi", "hatch", "pdm", "rye", "pipenv", "conda", "mamba", "micromamba", "nice", "ionice",
         "numactl", "taskset", "chrt", "timeout", "stdbuf", "setsid", "sudo", "nsys", "ncu"), _wrapper,
    ),
    **dict.fromkeys(("bash", "sh"), _shell), **dict.fromkeys(("mpirun", "mpiexec", "prun"), mpirun),
}  # fmt: skip
