"""Plans the job of a scenario: its command line, its numbers of ranks and nodes, and the folder of its checkpoints.
Refuses parts that were copied from a script and can't work here: variables that no shell fills in, programs that start
the ranks on other machines, and options of torchrun that differ from node to node.

`errors_in` yields reasons why the job can't start; `warnings_in` yields reasons why it may not be the job that the user
means. Each is a clause, with what to do."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path

from pydantic_core import to_jsonable_python

from torchaos.harness import registry
from torchaos.harness.fault_drivers.storage_faults import memory_left
from torchaos.harness.host.native_libraries import NVML
from torchaos.harness.interfaces import Launcher, Need, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.record.environment import job_python, ranks_per_node, resolve_program
from torchaos.harness.record.plan import PlannedFault, PlannedJob, counted
from torchaos.harness.running.fault_checks import is_controllers
from torchaos.harness.running.launchers.torchrun_line import (
    container_in,
    most_nodes,
    options_of,
    ranks_in_words,
    script_of,
    world_of,
)
from torchaos.harness.scenario.checks import made, parameters_of, params_of
from torchaos.harness.scenario.field_types import fill, size_in_words
from torchaos.harness.scenario.grammar import Job, Scenario
from torchaos.harness.scenario.loader import COMMAND_LINE
from torchaos.harness.scenario.yaml_source import read

_NOT_SEEN = {
    Need.HANGS: "an assertion asks for the culprits of a hang, which are looked for on one machine only",
    Need.LEFTOVERS: "an assertion asks for what the job left behind, which is looked for on one machine only",
}


def check_remote(
    launcher: str, job: PlannedJob, faults: Sequence[PlannedFault], collect: Collection[Need], file: Path
) -> None:  # fmt: skip
    """Raises UsageError if the scenario uses a feature that works only on the machine of `torchaos run`. The
    capabilities that faults need are checked on the nodes."""
    wrong = next((why for need, why in _NOT_SEEN.items() if need in collect), None)
    if job.checkpoints_size:
        wrong = "job.checkpoints.size makes a disk on this machine"
    for number, fault in enumerate(faults):
        found, place = registry.find("injectors", fault.inject), partial(at, file, "faults", number, "inject")
        if is_controllers(found, launcher) and isinstance(fault.trigger, Moment):
            why = "the cluster does it, and no rank waits for that; write time or after, and no step"
            raise UsageError(f"{place()}: fault {fault.id}: {why}")
        nodes = fault.target.nodes or {rank // job.per_node for rank in fault.target.ranks}
        if getattr(found, "whole_job", False) and len(fault.target.nodes) < job.nodes:
            every = ", ".join(map(str, range(job.nodes)))
            raise UsageError(f"{place()}: fault {fault.id}: it hits the whole job; write target: {{nodes: [{every}]}}")
        outside = fault.where == "node" and found.hits != "files"
        if outside and isinstance(fault.trigger, Moment) and len(nodes) > 1:
            wrong = f"fault {fault.id} hits several nodes at the moment of one rank; write a fault for each node"
    if wrong:
        remedy = "leave it out, or write launcher: local or netns"
        raise UsageError(f"{at(file, 'launcher')}: launcher: {launcher}: {wrong}; {remedy}")


_VARIABLE = re.compile(r"\$(\w+|\{\w+[^}]*\}|\(.*)|`.*")
_STARTS = ("srun", "mpirun", "mpiexec", "prun", "ibrun", "jsrun")  # they start ranks where torchaos does not see them
_SUBMITS = ("sbatch", "bsub", "qsub")  # they return before the job begins
_OF_A_NODE = ("node-rank", "master-addr", "master-port", "rdzv-endpoint")


def errors_in(command: Sequence[str], env: Mapping[str, str], launcher: str, nodes: int) -> Iterator[str]:
    """Why the job can't start. `nodes`: the number of nodes that the launcher makes. `env`: the complete
    environment."""
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
    """Why the job may not do what the user means."""
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
    asked = world_of(command, {})[1] if "nnodes" in options else None
    if not sets and asked and asked > 1:
        yield (
            f"torchrun waits for {asked} nodes (--nnodes), and launcher: {launcher} starts one; leave --nnodes out, "
            "start the others yourself, or write launcher: netns, ssh, slurm or kubernetes"
        )
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


_COUNTED = ("gpu", "cpu", "auto")
_MOST = 1_000_000  # ranks, or nodes


def placeholders(here: Path) -> dict[str, str]:
    """The values of the placeholders, by name. `here`: the folder of the scenario file."""
    return {"jobs": str(files("torchaos.scenarios") / "jobs"), "here": str(here), "python": sys.executable}


def launcher_for(job: Job, name: str, file: Path) -> Launcher:
    """The launcher with the settings of the job. `file`: the file with the job."""
    found, here = registry.find("launchers", name), file.parent.absolute()
    own = {one.name for one in parameters_of(found)} & job.model_fields_set
    settings = {key: to_jsonable_python(job.settings[key]) for key in own}
    found.settle(settings, lambda path: str(here / fill(path, placeholders(here))))
    launcher: Launcher = made(found, settings)
    return launcher


def _launcher_if_known(job: Job, name: str, file: Path) -> Launcher:
    """The launcher, or `local` if there is none of that name, which another check reports."""
    return launcher_for(job, name if name in registry.names("launchers") else "local", file)


def planned_job(job: Job, file: Path, attach: int | None, launcher_name: str = "local") -> PlannedJob:
    """The planned job. `file`: the file with the job. `attach`: the pid of a running torchrun. Raises UsageError if the
    job can't be started here, or if its number of ranks can't be read from the command."""
    here, launcher = file.parent.absolute(), launcher_for(job, launcher_name, file)
    values = placeholders(here)
    if any("{nvml}" in value for value in job.env.values()):  # only if needed: the library may have to be compiled
        values["nvml"] = str(NVML.path().parent)
    command, cwd = _line(job, here, values)
    if not command:
        raise UsageError(f"{at_the_command(file)}: job.command is empty; write the torchrun command line")
    if attach is None and not launcher.own_folders and not cwd.is_dir():
        raise UsageError(f"{at(file, 'job', 'cwd')}: job.cwd: {cwd} is no folder; correct it")
    if attach is None and launcher.host_programs:
        command[0] = _program(command[0], cwd, file, "job", "command")
    env = {**os.environ, **job.env}
    runs_already = attach is not None or bool(launcher.attached)
    per_node, nodes = _ranks(job, launcher, command, env)
    if not runs_already and (wrong := next(errors_in(command, env, launcher_name, nodes), None)):
        raise UsageError(f"{at_the_command(file)}: {wrong}")
    if job.world_size is None and launcher.host_programs:
        per_node = per_node or _counted(command, env)
    world = _world(job, per_node, nodes, file)
    if runs_already and job.resubmit:
        why = "torchaos does not start a job that runs already; leave resubmit out"
        raise UsageError(f"{at(file, 'job', 'resubmit')}: job.resubmit: {why}")
    if job.replicas > 1:
        nodes = _replicas(job, nodes, world, runs_already, file)
    launcher = launcher.plan(nodes, str(cwd) if "cwd" in job.model_fields_set else "")
    return PlannedJob(
        command=tuple(command),
        cwd=str(cwd),
        env={name: fill(value, values) for name, value in job.env.items()},
        world_size=world,
        nodes=nodes,
        timeout_s=job.timeout,
        checkpoints=fill(job.checkpoints.path, values) if job.checkpoints else None,
        checkpoints_size=_size(job, runs_already, file),
        checkpoints_local=_local(job, launcher_name, values, file),
        endpoints=dict(job.endpoints),
        log=job.log.model_dump(exclude_none=True) if job.log else None,
        resubmit_times=job.resubmit.times if job.resubmit else 0,
        resubmit_delay_s=job.resubmit.delay if job.resubmit else 0.0,
        resubmit_command=_next_command(job, launcher, here, values, file),
        resubmit_env={name: fill(value, values) for name, value in job.resubmit.env.items()} if job.resubmit else {},
        attach_pid=attach,
        replicas=job.replicas,
        busy_nodes=_busy_nodes(most_nodes(command, env), nodes, world, per_node),
        settings=params_of(launcher),
        runs_already=launcher.attached,
    )


def folder_of(job: Job, file: Path) -> Path:
    """The job's working directory. `file`: the file with the job."""
    here = file.parent.absolute()
    return _line(job, here, placeholders(here))[1]


def written_size(job: Job, launcher: str, file: Path) -> tuple[int, int] | None:
    """The numbers of ranks and nodes, if the file gives them without a look at the machine. None otherwise."""
    here = file.parent.absolute()
    command, _ = _line(job, here, placeholders(here))
    per_node, nodes = _ranks(job, _launcher_if_known(job, launcher, file), command, {**os.environ, **job.env})
    world = _known_world(job, per_node, nodes)
    return (world, nodes * job.replicas) if world else None


def missing_script(job: Job, launcher: str, file: Path) -> str:
    """A sentence about the script in the command, if it does not exist. Empty if it exists, or if this is not known."""
    here = file.parent.absolute()
    command, cwd = _line(job, here, placeholders(here))
    script = script_of(command) if _launcher_if_known(job, launcher, file).host_programs else None
    if script and "{" not in str(cwd) and not cwd.is_dir():
        return f"{os.path.normpath(cwd)}: there is no such folder; correct job.cwd"
    is_missing = script and "{" not in script and not (cwd / script).is_file()
    return f"{cwd / str(script)}: there is no such file; correct job.command or job.cwd" if is_missing else ""


def wrong_line(job: Job, launcher: str, file: Path) -> str:
    """Why the command can't start the job, as far as its text shows it. Empty if nothing is wrong."""
    here = file.parent.absolute()
    command, _cwd = _line(job, here, placeholders(here))
    found = _launcher_if_known(job, launcher, file)
    if not command or found.attached or launcher not in registry.names("launchers"):
        return ""
    return next(errors_in(command, {}, launcher, _ranks(job, found, command, {})[1]), "")


def check_script(job: Job, launcher: str, file: Path) -> None:
    """Raises UsageError if the script in the command does not exist. The text has the place of the command in the
    file."""
    if missing := missing_script(job, launcher, file):
        raise UsageError(f"{at_the_command(file)}: {missing}")


def _program(name: str, cwd: Path, file: Path, *keys: str) -> str:
    """The absolute path of the program of the command at these keys in the file. Raises UsageError if there is no such
    program."""
    try:
        return resolve_program(name, cwd)
    except UsageError as error:
        raise UsageError(f"{at(file, *keys)}: {error}") from error


def _ranks(
    job: Job, launcher: Launcher, command: Sequence[str], env: Mapping[str, str]
) -> tuple[int | None, int]:  # fmt: skip
    """The ranks per node (None if the command does not give a number), and the number of nodes."""
    per_node, nodes = world_of(command, env)
    return per_node, job.nodes or launcher.node_count or nodes or 1


def _world(job: Job, per_node: int | None, nodes: int, file: Path) -> int:
    """The number of ranks. Raises UsageError if it is not known, or too large to plan."""
    world = _known_world(job, per_node, nodes)
    if world is None:
        problem = "how many ranks the job has can't be read from job.command"
        raise UsageError(f"{at_the_command(file)}: {problem}; write job.world_size")
    if max(world, nodes) > _MOST:
        size = f"{counted(world, 'rank')} on {counted(nodes, 'node')}"
        raise UsageError(f"{at_the_command(file)}: a job of {size} can't be planned; the most is {_MOST}")
    return world


def _known_world(job: Job, per_node: int | None, nodes: int) -> int | None:
    return job.world_size or (per_node * nodes * job.replicas if per_node else None)


def _counted(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """The ranks per node for `--nproc-per-node gpu`, `cpu` or `auto`, counted on this machine as torchrun does it. None
    for other commands."""
    word = ranks_in_words(command, env)
    return ranks_per_node(job_python(command), word, frozenset(env.items())) if word in _COUNTED else None


def _line(job: Job, here: Path, values: Mapping[str, str]) -> tuple[list[str], Path]:
    """The words of the command with the placeholders filled in, and the working directory."""
    words = shlex.split(job.command) if isinstance(job.command, str) else job.command
    return [fill(word, values) for word in words], (here / fill(job.cwd, values)).absolute()


def _next_command(
    job: Job, launcher: Launcher, here: Path, values: Mapping[str, str], file: Path
) -> tuple[str, ...]:  # fmt: skip
    """The command line of the later submissions, if it differs from the first. Otherwise empty. Raises UsageError if it
    can't be started."""
    if not job.resubmit or not job.resubmit.command:
        return ()
    command, cwd = _line(job.model_copy(update={"command": job.resubmit.command}), here, values)
    if not command:
        empty = "job.resubmit.command is empty; write a torchrun command line, or leave it out"
        raise UsageError(f"{at(file, 'job', 'resubmit', 'command')}: {empty}")
    if launcher.host_programs:
        command[0] = _program(command[0], cwd, file, "job", "resubmit", "command")
    script = script_of(command)
    if launcher.host_programs and script and "{" not in script and not (cwd / script).is_file():
        place = at(file, "job", "resubmit", "command")
        raise UsageError(f"{place}: {cwd / script}: there is no such file; correct job.resubmit.command")
    return tuple(command)


def at(file: Path, *keys: str | int) -> str:
    """The place of a value in the file, or of what encloses it."""
    with suppress(UsageError):  # the file is gone
        return str(file) if file == COMMAND_LINE else read(file).place(keys).within(file)
    return str(file)


def at_the_command(file: Path) -> str:
    return at(file, "job", "command")


def _replicas(job: Job, nodes: int, world: int, runs_already: bool, file: Path) -> int:
    """The number of nodes of a job with replicas: each replica has its own torchrun and counts as a node. Raises
    UsageError if the job can't have replicas."""
    if nodes > 1 or runs_already:
        job_kind = "a job that runs already" if runs_already else f"replicas of {nodes} nodes each"
        why = f"{job_kind} can't be started side by side here; leave replicas out"
        raise UsageError(f"{at(file, 'job', 'replicas')}: job.replicas: {why}")
    if world % job.replicas:
        ranks = counted(world, "rank")
        why = f"{ranks} can't be shared out evenly among {job.replicas} replicas"
        raise UsageError(f"{at(file, 'job', 'world_size')}: job.world_size: {why}")
    return job.replicas


def check_replicas(scenario: Scenario, file: Path) -> None:
    """Raises UsageError if a scenario with replicas uses a feature that counts the attempts of a single torchrun.
    Replicas restart independently of each other, so such a count has no meaning."""
    wrong = {
        f"launcher: {scenario.launcher}": not registry.find("launchers", scenario.launcher).replicas,
        "steady_state": any(item.name in ("ranks_up", "steps") for item in scenario.steady_state),
        "until": bool(scenario.until),
        "state: recovered": any(fault.when.state == "recovered" for fault in scenario.faults),
    }
    for feature in (name for name, given in wrong.items() if given):
        several = "job.replicas starts several; leave it out"
        raise UsageError(f"{at(file, 'job', 'replicas')}: {feature} knows the ranks of one torchrun, and {several}")


def _busy_nodes(most: int | None, nodes: int, world: int, per_node: int | None) -> int:
    """The number of nodes that train at the same time, if the job has standby nodes. Otherwise 0. `most`: the largest
    number of nodes that the command allows."""
    return most if most and per_node and most < nodes and world <= most * per_node else 0


def _size(job: Job, runs_already: bool, file: Path) -> int | None:
    """The size in bytes of the disk that is made for the checkpoints. None if the scenario wants no such disk. Raises
    UsageError if it can't be made."""
    size = job.checkpoints and job.checkpoints.size
    wrong = "a job that runs already has its files open; leave size out" if runs_already else ""
    if size and not wrong and size > (left := memory_left()):
        wrong = f"{size_in_words(size)} would be in memory, of which {size_in_words(left)} are free"
    if size and wrong:
        raise UsageError(f"{at(file, 'job', 'checkpoints', 'size')}: job.checkpoints.size: {wrong}")
    return size or None


def _local(job: Job, launcher: str, values: Mapping[str, str], file: Path) -> str | None:
    """The path at which each node gets a folder of its own. None if the scenario wants none. Raises UsageError if the
    launcher can't make such folders."""
    if not (local := job.checkpoints and job.checkpoints.local):
        return None
    if not registry.find("launchers", launcher).local_disks:
        wrong = f"launcher: {launcher} gives no node a folder of its own; write launcher: netns"
        raise UsageError(f"{at(file, 'job', 'checkpoints', 'local')}: job.checkpoints.local: {wrong}")
    return fill(local, values)
