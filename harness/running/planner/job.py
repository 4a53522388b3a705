"""Plans the job of a scenario: its command line, its numbers of ranks and nodes, and the folder of its checkpoints."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import xxhash

from torchaos.harness import registry
from torchaos.harness.contracts import UsageError
from torchaos.harness.machine.native import NVML
from torchaos.harness.mechanics.storage.own_disk import memory_left
from torchaos.harness.record.environment import job_python, ranks_per_node, resolve_program
from torchaos.harness.record.plan import PlannedJob
from torchaos.harness.running.launchers.pod_manifest import Manifest
from torchaos.harness.running.launchers.torchrun_line import most_nodes, ranks_in_words, script_of, world_of
from torchaos.harness.running.planner.copied import errors_in
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.job import Job
from torchaos.harness.scenario.other_job import COMMAND_LINE
from torchaos.harness.scenario.placeholders import fill
from torchaos.harness.scenario.sizes import size_in_words
from torchaos.harness.scenario.yaml_source import read

_COUNTED = ("gpu", "cpu", "auto")
_MOST = 1_000_000  # ranks, or nodes


def placeholders(here: Path) -> dict[str, str]:
    """The values of the placeholders. `here`: the folder of the scenario file."""
    return {"jobs": str(files("torchaos.scenarios") / "jobs"), "here": str(here), "python": sys.executable}


def planned_job(job: Job, file: Path, attach: int | None, launcher: str = "local") -> PlannedJob:
    """The planned job. `file`: the file with the job. `attach`: pid of a running torchrun. Raises UsageError if the job
    can't be started here, or if its number of ranks can't be read from the command."""
    here = file.parent.absolute()
    values = placeholders(here)
    if any("{nvml}" in value for value in job.env.values()):  # only if needed: the library may have to be compiled
        values["nvml"] = str(NVML.path().parent)
    command, cwd = _line(job, here, values)
    if not command:
        raise UsageError("job.command is empty; write the torchrun command line")
    if attach is None:
        if job.pods is None and not cwd.is_dir():
            raise UsageError(f"job.cwd: {cwd} is no folder")
        if _is_of_this_machine(job):
            command[0] = resolve_program(command[0], cwd)
    env = {**os.environ, **job.env}
    runs_already = attach is not None or bool(job.pods and job.pods.attach)
    per_node, count = _ranks(job, command, env)
    if not runs_already and (wrong := next(errors_in(command, env, launcher, count), None)):
        raise UsageError(f"{_at_the_command(file)}: {wrong}")
    if job.world_size is None and _is_of_this_machine(job):
        per_node = per_node or _counted(command, env)
    nodes, world = count, _world(job, per_node, count)
    if world is None:
        problem = "how many ranks the job has can't be read from job.command"
        raise UsageError(f"{_at_the_command(file)}: {problem}; write job.world_size")
    if max(world, nodes) > _MOST:
        raise UsageError(
            f"{_at_the_command(file)}: a job of {world} ranks on {nodes} nodes can't be planned; the most is {_MOST}"
        )
    if runs_already and job.resubmit:
        raise UsageError("job.resubmit: torchaos does not start a job that runs already; leave resubmit out")
    if job.replicas > 1:
        nodes = _replicas(job, nodes, world, runs_already)
    return PlannedJob(
        command=tuple(command),
        cwd=str(cwd),
        env={name: fill(value, values) for name, value in job.env.items()},
        world_size=world,
        nodes=nodes,
        timeout_s=job.timeout,
        checkpoints=fill(job.checkpoints.path, values) if job.checkpoints else None,
        checkpoints_size=_size(job, runs_already),
        endpoints=dict(job.endpoints),
        log=job.log.model_dump(exclude_none=True) if job.log else None,
        resubmit_times=job.resubmit.times if job.resubmit else 0,
        resubmit_delay_s=job.resubmit.delay if job.resubmit else 0.0,
        attach_pid=attach,
        replicas=job.replicas,
        container=_container(job, here, values),
        busy_nodes=_busy_nodes(most_nodes(command, env), nodes, world, per_node),
        hosts=tuple(job.hosts),
        pods=_pods(job, here, cwd, nodes),
        slurm=job.slurm.model_dump() if job.slurm else {},
    )


def written_size(job: Job, file: Path) -> tuple[int, int] | None:
    """The numbers of ranks and nodes, as far as the file says them: without a look at the machine."""
    here = file.parent.absolute()
    command, _ = _line(job, here, placeholders(here))
    per_node, nodes = _ranks(job, command, {**os.environ, **job.env})
    world = _world(job, per_node, nodes)
    return (world, nodes * job.replicas) if world else None


def missing_script(job: Job, file: Path) -> str:
    """What is wrong if the script in the command does not exist. Empty if it does, or if this is not known."""
    here = file.parent.absolute()
    command, cwd = _line(job, here, placeholders(here))
    script = script_of(command) if _is_of_this_machine(job) else None
    is_missing = script and "{" not in script and not (cwd / script).is_file()
    return f"{cwd / str(script)}: there is no such file; correct job.command or job.cwd" if is_missing else ""


def check_script(job: Job, file: Path) -> None:
    """Raises UsageError if the script in the command does not exist. The text has the place of the command in the
    file."""
    if missing := missing_script(job, file):
        raise UsageError(f"{_at_the_command(file)}: {missing}")


def _ranks(job: Job, command: Sequence[str], env: Mapping[str, str]) -> tuple[int | None, int]:
    """The ranks per node, None if the command does not give their number, and the number of nodes."""
    per_node, nodes = world_of(command, env)
    return per_node, job.nodes or len(job.hosts) or nodes or 1


def _world(job: Job, per_node: int | None, nodes: int) -> int | None:
    return job.world_size or (per_node * nodes * job.replicas if per_node else None)


def _is_of_this_machine(job: Job) -> bool:
    """Whether the job uses this machine's own programs, not those of an image of containers or pods."""
    return job.pods is None and (job.container is None or job.container.image == "host")


def _counted(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """The ranks per node for `--nproc-per-node gpu`, `cpu` or `auto`, as torchrun counts them on this machine. None for
    other commands."""
    word = ranks_in_words(command, env)
    return ranks_per_node(job_python(command), word, frozenset(env.items())) if word in _COUNTED else None


def _line(job: Job, here: Path, values: Mapping[str, str]) -> tuple[list[str], Path]:
    """The words of the command with the placeholders filled in, and the working directory."""
    words = shlex.split(job.command) if isinstance(job.command, str) else job.command
    return [fill(word, values) for word in words], (here / fill(job.cwd, values)).absolute()


def _at_the_command(file: Path) -> str:
    return str(file) if file == COMMAND_LINE else read(file).place(("job", "command")).within(file)


def _replicas(job: Job, nodes: int, world: int, runs_already: bool) -> int:
    """The number of nodes of a job with replicas. Each replica has its own torchrun and counts as a node. Raises
    UsageError if the job can't have replicas."""
    if nodes > 1 or runs_already:
        job_kind = "a job that runs already" if runs_already else f"replicas of {nodes} nodes each"
        raise UsageError(f"job.replicas: {job_kind} can't be started side by side here; leave replicas out")
    if world % job.replicas:
        raise UsageError(f"job.world_size: {world} ranks can't be shared out evenly among {job.replicas} replicas")
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
        raise UsageError(f"{file}: {feature} knows the ranks of one torchrun, and {several}")


def _busy_nodes(most: int | None, nodes: int, world: int, per_node: int | None) -> int:
    """The number of nodes that train at the same time, if the job has standby nodes. Otherwise 0. `most`: the largest
    number of nodes that the command allows."""
    return most if most and per_node and most < nodes and world <= most * per_node else 0


def _size(job: Job, runs_already: bool) -> int | None:
    """The size in bytes of a disk of its own for the checkpoints. None if the scenario has no such disk. Raises
    UsageError if it can't be made."""
    size = job.checkpoints and job.checkpoints.size
    if size and runs_already:
        raise UsageError("job.checkpoints.size: a job that runs already has its files open; leave size out")
    if size and size > (left := memory_left()):
        raise UsageError(
            f"job.checkpoints.size: {size_in_words(size)} would be in memory, of which {size_in_words(left)} are free"
        )
    return size or None


def _pods(job: Job, here: Path, cwd: Path, nodes: int) -> dict[str, Any]:
    """The settings, the digest of the manifest (a twin is of the same manifest), and the directory in the pods, if the
    scenario names one. Raises UsageError if the manifest can't run the job on this number of nodes."""
    if job.pods is None:
        return {}
    if job.pods.attach:
        return job.pods.model_dump()
    file = (here / job.pods.manifest).absolute()
    Manifest.read(file, job.pods.objects).check(nodes, job.pods.container)
    digest = xxhash.xxh3_128_hexdigest(file.read_bytes())
    directory = {"cwd": str(cwd)} if "cwd" in job.model_fields_set else {}
    return {**job.pods.model_dump(), "manifest": str(file), "digest": digest, **directory}


def _container(job: Job, here: Path, values: Mapping[str, str]) -> dict[str, Any]:
    if job.container is None:
        return {}
    mounts = [fill(mount, values) for mount in job.container.mounts]
    return {"image": job.container.image, "mounts": [str(here / mount) for mount in mounts]}
