"""From a scenario to a Plan: placeholders filled, targets and parameters drawn, machine checked. Changes nothing."""

from __future__ import annotations

import inspect
import math
import os
import random
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from torchaos.harness import capabilities, registry
from torchaos.harness.agent.wire import Collectives, Moment, Phase
from torchaos.harness.contracts import Injector, Need, Target, UsageError, Where
from torchaos.harness.engine.permits import beyond
from torchaos.harness.environment import resolve_program
from torchaos.harness.gpu import library
from torchaos.harness.launchers.fits import misfit, needs_of
from torchaos.harness.launchers.torchrun_line import world_of
from torchaos.harness.network.transport import Machine, transport_of
from torchaos.harness.plan import After, Named, Plan, PlannedFault, PlannedJob, stream
from torchaos.harness.scenario.grammar import COLLECTIVE, Between, Fault, Item, Job, Limits, Scenario, When
from torchaos.harness.scenario.grammar import Target as Aim
from torchaos.harness.scenario.parameters import check_parameters
from torchaos.harness.scenario.placeholders import fill
from torchaos.harness.scenario.sizes import size_in_words
from torchaos.harness.storage.own_disk import memory_left

# Hooks of the agent that a need, or the phase of a trigger, switches on. "steps" is always on.
_HOOKS_OF_NEED = {
    Need.STEPS: ("steps",),
    Need.LOSS: ("loss", "lr"),
    Need.SAMPLES: ("samples",),
    Need.CHECKPOINTS: ("checkpoints",),
    Need.INVENTORY: ("checkpoints",),
    Need.TWIN: (),
    Need.LEFTOVERS: (),
    Need.STATE: ("state",),
    Need.COLLECTIVES: ("collectives", "stamps"),
    Need.HANGS: ("collectives", "stamps"),
}
_HOOKS_OF_PHASE: dict[Phase, tuple[str, ...]] = {
    Phase.START: (),
    Phase.DATA: ("samples",),
    Phase.FORWARD: ("samples", "loss"),
    Phase.BACKWARD: ("loss",),
    Phase.COLLECTIVE: ("collectives",),
    Phase.OPTIMIZER: (),
    Phase.CHECKPOINT_WRITE: ("checkpoints",),
    Phase.CHECKPOINT_WRITTEN: ("checkpoints",),
    Phase.CHECKPOINT_LOAD: ("checkpoints",),
}
# "any" draws among the phases that every training loop passes in every step.
_DRAWN_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def make_plan(
    scenario: Scenario, file: Path, seed: int, attach: int | None = None, consent: Sequence[str] = ()
) -> Plan:
    """Raises UsageError where the scenario can't be carried out here; the text names the file and the fault."""
    job = _job(scenario.job, file.parent.absolute(), attach)
    if job.replicas > 1:
        _check_replicas(scenario, file)
    faults = _told_of_each_other(
        [_fault(fault, scenario, job, file, stream(seed, fault.id or fault.inject)) for fault in scenario.faults]
    )
    _check_consent(scenario, faults, file, consent)
    asserts = tuple(_named("assertions", item) for item in scenario.assert_)
    collect = {need for one in asserts for need in registry.find("assertions", one.name).needs}
    hooks = {"steps"} | {hook for need in collect for hook in _HOOKS_OF_NEED[need]}
    hooks |= {hook for fault in faults for hook in _hooks_of(fault)}
    needs = {"pidfd", "proc"} | {name for fault in faults for name in registry.find("injectors", fault.inject).needs}
    try:
        needs |= needs_of(scenario.launcher, job.command, {**os.environ, **job.env})
    except UsageError as error:
        raise UsageError(f"{file}: job: {error}") from error
    needs |= {"mount"} if job.checkpoints_size else set()
    _check_machine(needs, file)
    limits = scenario.limits
    plan = Plan(
        scenario=scenario.scenario,
        description=scenario.description,
        seed=seed,
        job=job,
        faults=faults,
        asserts=asserts,
        steady_state=tuple(_condition(item, file) for item in scenario.steady_state),
        stop=tuple(_condition(item, file) for item in scenario.stop),
        until=tuple(_of_faults(_condition(item, file), faults) for item in scenario.until),
        launcher=scenario.launcher,
        max_ranks=limits.ranks,
        max_nodes=limits.nodes,
        max_percent=limits.percent,
        max_duration_s=limits.duration,
        never_ranks=tuple(limits.never.ranks),
        never_nodes=tuple(limits.never.nodes),
        consent=tuple(name for name in scenario.consent if name in consent),
        twin={"runs": scenario.twin.runs} if Need.TWIN in collect and scenario.twin.runs and attach is None else {},
        hooks=tuple(sorted(hooks)) if attach is None else (),
        collect=tuple(sorted(collect)),
        needs=tuple(sorted(needs)),
    )
    ranks, nodes = ({one for fault in faults for one in getattr(fault.target, of)} for of in ("ranks", "nodes"))
    if wrong := beyond(plan, ranks, nodes, job.world_size):
        raise UsageError(f"{file}: {wrong}; aim at fewer, or at others")
    return plan


def _placeholders(here: Path) -> dict[str, str]:
    return {"jobs": str(files("torchaos.scenarios") / "jobs"), "here": str(here), "python": sys.executable}


def _job(job: Job, here: Path, attach: int | None) -> PlannedJob:
    values = _placeholders(here)
    if any("{nvml}" in value for value in job.env.values()):  # only then: it may have to be compiled
        values["nvml"] = str(library.folder())
    words = shlex.split(job.command) if isinstance(job.command, str) else job.command
    if not words:
        raise UsageError("job.command is empty; write the torchrun command line")
    cwd = (here / fill(job.cwd, values)).absolute()
    command = [fill(word, values) for word in words]
    if attach is None:
        if not cwd.is_dir():
            raise UsageError(f"job.cwd: {cwd} is no folder")
        if job.container is None or job.container.image == "host":
            command[0] = resolve_program(command[0], cwd)
    per_node, nodes = world_of(command, {**os.environ, **job.env})
    nodes = job.nodes or nodes or 1
    world = job.world_size or (per_node * nodes * job.replicas if per_node else None)
    if world is None:
        raise UsageError("how many ranks the job has can't be read from job.command; write job.world_size")
    if job.replicas > 1:
        nodes = _replicas(job, nodes, world, attach)
    return PlannedJob(
        command=tuple(command),
        cwd=str(cwd),
        env={name: fill(value, values) for name, value in job.env.items()},
        world_size=world,
        nodes=nodes,
        timeout_s=job.timeout,
        checkpoints=fill(job.checkpoints.path, values) if job.checkpoints else None,
        checkpoints_size=_size(job, attach),
        endpoints=dict(job.endpoints),
        log=job.log.model_dump(exclude_none=True) if job.log else None,
        resubmit_times=job.resubmit.times if job.resubmit else 0,
        resubmit_delay_s=job.resubmit.delay if job.resubmit else 0.0,
        attach_pid=attach,
        replicas=job.replicas,
        container=_container(job, here, values),
    )


def _replicas(job: Job, nodes: int, world: int, attach: int | None) -> int:
    """As many nodes as replicas: each has a torchrun of its own."""
    if nodes > 1 or attach is not None:
        what = "a job that runs already" if attach is not None else f"replicas of {nodes} nodes each"
        raise UsageError(f"job.replicas: {what} can't be started side by side here; leave replicas out")
    if world % job.replicas:
        raise UsageError(f"job.world_size: {world} ranks can't be shared out evenly among {job.replicas} replicas")
    return job.replicas


def _check_replicas(scenario: Scenario, file: Path) -> None:
    """Replicas are started and restarted each by itself: what goes by the attempts of one torchrun can't be had."""
    wrong = {
        f"launcher: {scenario.launcher}": scenario.launcher != "local",
        "steady_state": any(item.name in ("ranks_up", "steps") for item in scenario.steady_state),
        "until": bool(scenario.until),
        "state: recovered": any(fault.when.state == "recovered" for fault in scenario.faults),
    }
    for what in (name for name, given in wrong.items() if given):
        several = "job.replicas starts several; leave it out"
        raise UsageError(f"{file}: {what} knows the ranks of one torchrun, and {several}")


def _size(job: Job, attach: int | None) -> int | None:
    size = job.checkpoints and job.checkpoints.size
    if size and attach is not None:
        raise UsageError("job.checkpoints.size: a job that runs already has its files open; leave size out")
    if size and size > (left := memory_left()):
        raise UsageError(
            f"job.checkpoints.size: {size_in_words(size)} would lie in memory, and {size_in_words(left)} are to be had"
        )
    return size or None


def _container(job: Job, here: Path, values: Mapping[str, str]) -> dict[str, Any]:
    if job.container is None:
        return {}
    mounts = [fill(one, values) for one in job.container.mounts]
    return {"image": job.container.image, "mounts": [str(here / one) for one in mounts]}


def _fault(fault: Fault, scenario: Scenario, job: PlannedJob, file: Path, draw: random.Random) -> PlannedFault:
    name = fault.id or fault.inject
    found = registry.find("injectors", fault.inject)
    target = _target(fault, job, scenario.limits, draw, f"{file}: fault {name}")
    trigger = _trigger(fault.when, target, draw, registry.phase_of(fault.inject))
    # What is triggered from outside is best applied from there too: it then asks nothing of the agent.
    where: Where = "node" if isinstance(trigger, After) and "node" in found.where else found.where[0]
    if job.attach_pid is not None and isinstance(trigger, Moment):
        raise UsageError(
            f"{file}: fault {name}: a job that is attached to has no agent that sees steps; write time or after"
        )
    if job.attach_pid is not None and where == "rank":
        raise UsageError(
            f"{file}: fault {name}: {fault.inject} needs the agent in the rank, and a job that is attached to has none"
        )
    if fault.times > 1 and isinstance(trigger, After) and where == "node":
        raise UsageError(
            f"{file}: fault {name}: times counts landings at a point of the training loop, and what is seen from "
            "outside comes once; write several faults"
        )
    if target.nodes == () and found.hits in ("agents", "nodes"):
        what = "a node's agent" if found.hits == "agents" else "whole nodes"
        raise UsageError(f"{file}: fault {name}: {fault.inject} hits {what}; write target: {{node: 0}}")
    if wrong := misfit(found, scenario.launcher):
        raise UsageError(f"{file}: fault {name}: {wrong}")
    if getattr(found, "on_collectives", False) and not fault.with_.get("ports"):
        over = transport_of({**os.environ, **job.env}, job.nodes, Machine.this())
        if not over.is_tcp:
            raise UsageError(
                f"{file}: fault {name}: {fault.inject} can't reach this job's collectives, which go over {over.name} "
                f"({over.why}); {over.instead}"
            )
    injector: Injector = found(**check_parameters(found, fault.with_, (), _silent)).plan(target, draw)
    return PlannedFault(
        id=name,
        inject=fault.inject,
        where=where,
        target=target,
        trigger=trigger,
        params=asdict(injector),  # type: ignore[call-overload]
        source=inspect.getfile(found),
        injector=found.__name__,
        duration_s=_duration(fault, found, scenario.limits, f"{file}: fault {name}"),
        times=fault.times,
    )


def _duration(fault: Fault, found: Any, limits: Limits, where: str) -> float | None:
    """How long it lasts: as it says, else as long as it may."""
    most = limits.duration
    if most is not None and fault.for_ is not None and fault.for_ > most:
        raise UsageError(
            f"{where}: it lasts {fault.for_:g} s, and limits.duration allows {most:g} s; write a shorter for"
        )
    ends_by_itself = found.lethal or not ("node" in found.where or getattr(found, "lasting", False))
    return fault.for_ if fault.for_ is not None or ends_by_itself else most


def _target(fault: Fault, job: PlannedJob, limits: Limits, draw: random.Random, where: str) -> Target:
    target = fault.target
    if target is None:
        return Target(())
    per_node = max(1, job.world_size // job.nodes)
    nodes = [node for node in range(job.nodes) if node not in limits.never.nodes]
    world = [rank for rank in range(job.world_size) if rank not in limits.never.ranks and rank // per_node in nodes]
    if (target.replica is not None or job.replicas > 1) and (found := _of_replica(target, job, where, draw, world)):
        return found
    drawn = target.count or target.percent or "any" in (target.rank, target.node)
    if drawn and not (nodes and world):
        raise UsageError(f"{where}: limits.never leaves nothing to draw from; shorten it")
    if target.node is not None or target.nodes is not None:
        some = target.nodes or [draw.choice(nodes) if target.node in ("any", None) else int(target.node)]
        if max(some) >= job.nodes:
            raise UsageError(f"{where}: there is no node {max(some)}; the job has {job.nodes}, counted from 0")
        chosen = tuple(sorted(set(some)))
        return Target(tuple(rank for rank in range(job.world_size) if rank // per_node in chosen), chosen)
    ranks: Iterable[int] = range(job.world_size)
    if target.rank is not None:
        ranks = [draw.choice(world) if target.rank == "any" else target.rank]
    elif target.ranks is not None:
        ranks = target.ranks
    elif target.local_rank is not None:
        ranks = [rank for rank in ranks if rank % per_node == target.local_rank] or [job.world_size]
    elif target.count is not None or target.percent is not None:
        count = target.count or max(1, math.floor(job.world_size * (target.percent or 0) / 100))
        if count > len(world):
            spared = "" if len(world) == job.world_size else f", less those of limits.never: {len(world)}"
            raise UsageError(f"{where}: it wants {count} ranks; the job has {job.world_size}{spared}")
        ranks = draw.sample(world, count)
    chosen = tuple(sorted(set(ranks)))
    if chosen[-1] >= job.world_size:
        raise UsageError(f"{where}: there is no rank {chosen[-1]}; the job has {job.world_size}, counted from 0")
    return Target(chosen)


def _of_replica(target: Aim, job: PlannedJob, where: str, draw: random.Random, world: Sequence[int]) -> Target | None:
    """Ranks of one replica, by their numbers in the whole job; None where the target names none by its number."""
    size = job.world_size // job.replicas
    if target.replica is None:
        named = [target.rank] if isinstance(target.rank, int) else target.ranks
        if named:
            raise UsageError(
                f"{where}: rank {named[0]} is one in each of {job.replicas} replicas; write {{replica: 0, rank: "
                f"{named[0]}}}"
            )
        return None
    if target.replica >= job.replicas:
        raise UsageError(
            f"{where}: there is no replica {target.replica}; the job has {job.replicas}, counted from 0"
            + ("; see job.replicas" if job.replicas == 1 else "")
        )
    first = target.replica * size
    ranks: Sequence[int] = range(size)
    if target.rank == "any":
        free = [rank - first for rank in world if first <= rank < first + size]
        if not free:
            raise UsageError(f"{where}: limits.never leaves nothing of replica {target.replica} to draw from")
        ranks = [draw.choice(free)]
    elif target.rank is not None or target.ranks is not None:
        ranks = [target.rank] if target.rank is not None else target.ranks or ()
    if max(ranks) >= size:
        raise UsageError(f"{where}: there is no rank {max(ranks)} in a replica; each has {size}, counted from 0")
    return Target(tuple(sorted({first + rank for rank in ranks})))


def _trigger(when: When, target: Target, draw: random.Random, usual: Phase | None) -> Moment | After:
    """`usual`: where such a fault lands, when the scenario names no phase."""
    which = {name: getattr(when, name) for name in COLLECTIVE if name in when.model_fields_set}
    if which or when.model_fields_set & {"step", "phase", "attempt"}:
        step = draw.randint(*when.step.between) if isinstance(when.step, Between) else when.step
        phase = draw.choice(_DRAWN_PHASES) if when.phase == "any" else Phase(when.phase) if when.phase else usual
        collectives = Collectives(**which) if which else None
        phase = Phase.COLLECTIVE if which else phase
        pacer = target.ranks[0] if target.ranks else 0
        return Moment(pacer, step, phase, when.attempt, when.nth, collectives=collectives)
    if when.after is not None:
        return After(when.delay, when.after, when.state, when.checkpoints or 0, not_before_s=when.time or 0.0)
    return After(when.time if when.time is not None else when.delay, None, when.state, when.checkpoints or 0)


def _told_of_each_other(faults: Sequence[PlannedFault]) -> tuple[PlannedFault, ...]:
    """What waits for another fault's recovery waits for its being taken back too, where it lasts, and takes nothing for
    it that a rank still does before it dies."""
    by_id = {fault.id: fault for fault in faults}
    found = []
    for fault in faults:
        when = fault.trigger
        if isinstance(when, After) and when.state == "recovered" and when.fault in by_id:
            first = by_id[when.fault]
            when = replace(when, lasting=first.duration_s is not None, lethal=registry.is_lethal(first.inject))
        found.append(replace(fault, trigger=when))
    return tuple(found)


def _hooks_of(fault: PlannedFault) -> tuple[str, ...]:
    usual = registry.phase_of(fault.inject) if fault.where == "rank" else None
    phase = fault.trigger.phase if isinstance(fault.trigger, Moment) else usual
    own: tuple[str, ...] = getattr(registry.find("injectors", fault.inject), "hooks", ())
    return (*own, *(_HOOKS_OF_PHASE[phase] if phase else ()))


def _named(group: str, item: Item) -> Named:
    found: Any = registry.find(group, item.name)
    return Named(item.name, check_parameters(found, item.params, (), _silent))


def _silent(*_: object) -> None:
    """The loader has told of all that is wrong with parameters."""


def _check_consent(scenario: Scenario, faults: Sequence[PlannedFault], file: Path, given: Sequence[str]) -> None:
    """What can hurt the host beyond the job needs the word of whoever wrote the scenario, and of whoever runs it."""
    for fault in faults:
        wanted = str(getattr(registry.find("injectors", fault.inject), "consent", ""))
        missing = [] if wanted in scenario.consent else [f"`consent: [{wanted}]` in the scenario"]
        missing += [] if wanted in given else [f"--consent {wanted} on the command line"]
        if wanted and missing:
            raise UsageError(
                f"{file}: fault {fault.id}: {fault.inject} can hurt the host, not only the job; "
                f"if you want that, write {' and '.join(missing)}"
            )


def _condition(item: Item, file: Path) -> Named:
    """A command in it may name placeholders."""
    named, values = _named("conditions", item), _placeholders(file.parent.absolute())
    filled = {
        name: [fill(word, values) for word in value] if isinstance(value, list) else value
        for name, value in named.params.items()
    }
    return Named(named.name, filled)


def _of_faults(condition: Named, faults: Sequence[PlannedFault]) -> Named:
    """With what the condition wants to know of the faults that were planned."""
    told = getattr(registry.find("conditions", condition.name), "of_faults", None)
    return replace(condition, params={**condition.params, **told(condition.params, faults)}) if told else condition


def _check_machine(needs: Iterable[str], file: Path) -> None:
    for name in sorted(needs):
        found = capabilities.check(name)
        if not found.present:
            raise UsageError(f"{file}: this machine lacks {name} ({found.detail}); {found.remedy}")
