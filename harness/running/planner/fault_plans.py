"""Plans the faults, assertions and conditions of a scenario: draws targets and triggers from the seed, and checks each
fault against the job, the launcher, the limits, and the transport of the job's collectives.

The transport is predicted before the job starts, because a fault in TCP affects only TCP. `transport_of` asks the same
questions in the same order as NCCL (its user guide, "Environment Variables"): NCCL_NET, NCCL_IB_DISABLE, then the
hardware of the machine. Gloo and the rendezvous always use TCP."""

from __future__ import annotations

import inspect
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torchaos.harness import base_classes, registry
from torchaos.harness.interfaces import Target, UsageError, Where
from torchaos.harness.protocol.agent_plan import Collectives, Moment
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.record.plan import After, Named, PlannedFault, PlannedJob, counted
from torchaos.harness.running.fault_checks import misfit
from torchaos.harness.running.planner.job_plan import placeholders
from torchaos.harness.scenario.checks import check_parameters, made
from torchaos.harness.scenario.field_types import fill
from torchaos.harness.scenario.grammar import COLLECTIVE, Between, Fault, Item, Limits, Scenario, When
from torchaos.harness.scenario.grammar import Target as Aim
from torchaos.harness.scenario.yaml_source import read

# "any" draws from the phases that every training loop enters in every step.
_DRAWN_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True)
class FaultAt:
    """The place of a fault in its file, as text for messages. The file is read only if a message is made."""

    file: Path
    number: int
    fault: Fault
    key: str = "inject"

    def __str__(self) -> str:
        where = str(self.file)
        with suppress(UsageError):
            where = read(self.file).place(("faults", self.number, self.key)).within(self.file)
        return f"{where}: fault {self.fault.id or self.fault.inject}"


def target_of(fault: Fault, job: PlannedJob, limits: Limits, draw: random.Random, where: object) -> Target:
    """The ranks and nodes that a fault hits. `where`: the place or name of the fault, for messages. Raises UsageError
    if the target does not exist, or if no rank or node is left to draw."""
    target = fault.target
    if target is None:
        return Target(())
    nodes = sorted(set(range(job.nodes)) - set(limits.never.nodes))
    there, never = set(nodes), set(limits.never.ranks)
    world = [rank for rank in range(job.world_size) if rank not in never and rank // job.per_node in there]
    if (target.replica is not None or job.replicas > 1) and (found := _of_replica(target, job, where, draw, world)):
        return found
    drawn = target.count or target.percent or "any" in (target.rank, target.node)
    if drawn and not (nodes and world):
        raise UsageError(f"{where}: limits.never leaves no rank to draw from; shorten it")
    if target.node is not None or target.nodes is not None:
        return _of_nodes(target, job, where, draw, nodes)
    chosen = tuple(sorted(set(_some_ranks(target, job, where, draw, world))))
    if chosen[-1] >= job.world_size:
        raise UsageError(f"{where}: there is no rank {chosen[-1]}; the job has {job.world_size}, counted from 0")
    return Target(chosen)


def _of_nodes(target: Aim, job: PlannedJob, where: object, draw: random.Random, nodes: Sequence[int]) -> Target:
    """The named nodes, or one drawn from `nodes`, with all their ranks."""
    some = target.nodes or [draw.choice(nodes) if target.node in ("any", None) else int(target.node)]
    if max(some) >= job.nodes:
        raise UsageError(f"{where}: there is no node {max(some)}; the job has {job.nodes}, counted from 0")
    chosen = tuple(sorted(set(some)))
    return Target(tuple(rank for rank in range(job.world_size) if rank // job.per_node in chosen), chosen)


def _some_ranks(
    target: Aim, job: PlannedJob, where: object, draw: random.Random, world: Sequence[int]
) -> Iterable[int]:  # fmt: skip
    """The named ranks, or as many as are asked for, drawn from `world`; all ranks if none are named."""
    if target.rank is not None:
        return [draw.choice(world) if target.rank == "any" else target.rank]
    if target.ranks is not None:
        return target.ranks
    if target.local_rank is not None:
        if target.local_rank >= job.per_node:
            raise UsageError(
                f"{where}: there is no local rank {target.local_rank}; each node has {job.per_node}, counted from 0"
            )
        return range(target.local_rank, job.world_size, job.per_node)
    if target.count is not None or target.percent is not None:
        count = target.count or max(1, math.floor(job.world_size * (target.percent or 0) / 100))
        if count > len(world):
            spared = "" if len(world) == job.world_size else f", less those of limits.never: {len(world)}"
            raise UsageError(f"{where}: it needs {counted(count, 'rank')}; the job has {job.world_size}{spared}")
        return draw.sample(world, count)
    return range(job.world_size)


def _of_replica(
    target: Aim, job: PlannedJob, where: object, draw: random.Random, world: Sequence[int]
) -> Target | None:  # fmt: skip
    """The target ranks in one replica, by their numbers in the whole job. None if the target names neither a replica
    nor a rank. Raises UsageError if the replica or a rank does not exist."""
    size = job.world_size // job.replicas
    if target.replica is None:
        named = [target.rank] if isinstance(target.rank, int) else target.ranks
        if named:
            raise UsageError(
                f"{where}: each of {job.replicas} replicas has a rank {named[0]}; write {{replica: 0, rank: "
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
            raise UsageError(f"{where}: limits.never leaves no rank of replica {target.replica} to draw from")
        ranks = [draw.choice(free)]
    elif target.rank is not None or target.ranks is not None:
        ranks = [target.rank] if target.rank is not None else target.ranks or ()
    if max(ranks) >= size:
        raise UsageError(f"{where}: there is no rank {max(ranks)} in a replica; each has {size}, counted from 0")
    return Target(tuple(sorted({first + rank for rank in ranks})))


def trigger_of(when: When, target: Target, draw: random.Random, usual: Phase | None) -> Moment | After:
    """The trigger of a fault. `usual`: the phase in which this kind of fault lands if the scenario gives none."""
    filters = {name: getattr(when, name) for name in COLLECTIVE if name in when.model_fields_set}
    if filters or when.model_fields_set & {"step", "phase", "attempt"}:
        step = draw.randint(*when.step.between) if isinstance(when.step, Between) else when.step
        phase = draw.choice(_DRAWN_PHASES) if when.phase == "any" else Phase(when.phase) if when.phase else usual
        collectives = Collectives(**filters) if filters else None
        phase = Phase.COLLECTIVE if filters else phase
        pacer = target.ranks[0] if target.ranks else 0
        return Moment(pacer, step, phase, when.attempt, when.nth, collectives=collectives)
    if when.after is not None:
        return After(when.delay, when.after, when.state, when.checkpoints or 0, not_before_s=when.time or 0.0)
    return After(when.time if when.time is not None else when.delay, None, when.state, when.checkpoints or 0)


def named(group: str, item: Item) -> Named:
    """The assertion or condition `item`, with all its parameters, including defaults. `group`: "assertions" or
    "conditions"."""
    found: Any = registry.find(group, item.name)
    return Named(item.name, check_parameters(found, item.params, (), ignore))


def ignore(*_: object) -> None:
    """Drops mistakes in parameters. The loader has already reported them."""


def condition(item: Item, file: Path) -> Named:
    """The condition `item` for the plan. The placeholders in its commands are filled in. `file`: the scenario file."""
    found, values = named("conditions", item), placeholders(file.parent.absolute())
    filled = {
        name: [fill(word, values) for word in value] if isinstance(value, list) else value
        for name, value in found.params.items()
    }
    return Named(found.name, filled)


def with_facts_of(condition: Named, faults: Sequence[PlannedFault]) -> Named:
    """The condition, completed with the parameters that depend on the planned faults (see `of_faults` of the
    condition's class)."""
    facts = registry.find("conditions", condition.name).of_faults(condition.params, faults)
    return replace(condition, params={**condition.params, **facts})


# The variable that gives each attempt of torchrun its own store, without the gloo addresses of the attempt before.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Machine:
    """The hardware and libraries of a machine that collectives may use."""

    gpus: int = 0
    adapters: tuple[str, ...] = ()  # InfiniBand or RoCE
    plugin: str | None = None  # a network plug-in of NCCL

    @classmethod
    def this(cls) -> Machine:
        adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        return cls(gpus, tuple(adapters), find_library("nccl-net") if gpus else None)


@dataclass(frozen=True)
class Transport:
    """The transport of a job's collectives, and why it is used."""

    name: str  # such as "NCCL over InfiniBand"
    why: str
    instead: str = ""  # how the user can switch the job to TCP; empty if it uses TCP

    @property
    def is_tcp(self) -> bool:
        return not self.instead


def transport_of(env: Mapping[str, str], nodes: int, machine: Machine) -> Transport:
    """The transport of a job on this number of nodes. `env`: the job's complete environment."""
    if nodes < 2:
        return Transport(
            "loopback and shared memory", "all ranks are on one node", "let the job run on two nodes or more"
        )
    if not machine.gpus or env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Transport("gloo over TCP", "there is no GPU for NCCL")
    if "NCCL_HOSTID" in env:
        return Transport(
            "NVLink and shared memory", "NCCL_HOSTID makes NCCL take all nodes for one machine", "remove NCCL_HOSTID"
        )
    sockets = 'write env: {NCCL_NET: Socket, NCCL_IB_DISABLE: "1"}'
    net = env.get("NCCL_NET", "").lower()
    if net == "socket":
        return Transport("NCCL over TCP", "NCCL_NET is Socket")
    if net and net != "ib":
        return Transport(f"NCCL over {env['NCCL_NET']}", "NCCL_NET says so", sockets)
    if machine.plugin and env.get("NCCL_NET_PLUGIN", "").lower() != "none" and net != "ib":
        return Transport("NCCL over a plugin's network", f"{machine.plugin} is installed", sockets)
    if machine.adapters and env.get("NCCL_IB_DISABLE", "0") == "0":
        return Transport("NCCL over InfiniBand or RoCE", f"there is {', '.join(machine.adapters)}", sockets)
    return Transport("NCCL over TCP", "there is no other network that NCCL would take")


def kept_from_plugin(env: Mapping[str, str], nodes: int) -> str | None:
    """Why the job's NCCL would not use the network plug-in of the harness, and what to write instead. None if it would
    use the plug-in."""
    if set_ := next((name for name in ("NCCL_NET", "NCCL_NET_PLUGIN") if env.get(name)), None):
        return (
            f"the job's environment has {set_}={env[set_]}, and the fault needs a network plug-in of torchaos, which "
            f"sends over TCP; remove {set_}"
        )
    switches = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if env.get(name) != "1"]
    if nodes < 2 and switches:
        wanted = ", ".join(f'{name}: "1"' for name in switches)
        return f"on one node NCCL sends through NVLink or shared memory; write env: {{{wanted}}}"
    return None


def planned_fault(
    fault: Fault, scenario: Scenario, job: PlannedJob, draw: random.Random, at: FaultAt
) -> PlannedFault:  # fmt: skip
    """The planned fault, with a fixed target, trigger and parameters. `at`: the place of the fault, for messages.
    Raises UsageError if the fault does not fit the job, the launcher or the limits."""
    found = registry.find("injectors", fault.inject)
    target = target_of(fault, job, scenario.limits, draw, replace(at, key="target"))
    trigger = trigger_of(fault.when, target, draw, registry.phase_of(fault.inject))
    # A fault that is triggered from outside should be applied from outside too, because then it needs no agent.
    where: Where = "node" if isinstance(trigger, After) and "node" in found.where else found.where[0]
    unfit = chain(_unfit(fault, found, where, trigger, job), _off_target(fault, found, target, scenario.launcher, job))
    if wrong := next(chain(unfit, _out_of_reach(fault, found, job)), None):
        raise UsageError(f"{at}: {wrong}")
    injector: base_classes.Fault = found(**check_parameters(found, fault.with_, (), ignore)).plan(target, draw)
    return PlannedFault(
        id=fault.id or fault.inject,
        inject=fault.inject,
        where=where,
        target=target,
        trigger=trigger,
        params=asdict(injector),  # type: ignore[call-overload]
        source=inspect.getfile(found),
        injector=found.__name__,
        duration_s=_duration(fault, found, scenario.limits, replace(at, key="for")),
        times=fault.times,
    )


def _unfit(fault: Fault, found: Any, where: Where, trigger: Moment | After, job: PlannedJob) -> Iterator[str]:
    """Why the fault can't come when the scenario says, in this job."""
    if job.attached and isinstance(trigger, Moment):
        yield "a job that torchaos attaches to has no agent that sees steps; write time or after"
    if job.attached and where == "rank":
        yield f"{fault.inject} needs the agent in the rank, and a job that torchaos attaches to has none"
    if fault.times > 1 and isinstance(trigger, After) and where == "node":
        yield (
            "times counts landings at a point of the training loop, and an event from outside comes once; write "
            "several faults"
        )


def _off_target(fault: Fault, found: Any, target: Target, launcher: str, job: PlannedJob) -> Iterator[str]:
    """Why the fault can't hit its target, with this launcher."""
    if wrong := misfit(found, launcher):
        yield wrong
    if job.attach_pid is not None and "links" in found.needs:
        yield "torchaos changes the network only of a job that it starts; leave --attach out"
    if wrong := made(registry.find("launchers", launcher), job.settings).refuses(found):
        yield wrong
    if target.nodes == () and found.hits in ("agents", "nodes"):
        noun = "a node's agent" if found.hits == "agents" else "whole nodes"
        yield f"{fault.inject} hits {noun}; write target: {{node: 0}}"


def _out_of_reach(fault: Fault, found: Any, job: PlannedJob) -> Iterator[str]:
    """Why the fault would not be felt: the job's collectives do not use what it hits."""
    env = {**os.environ, **job.env}
    if found.on_collectives and not fault.with_.get("ports"):
        over = transport_of(env, job.nodes, Machine.this())
        if not over.is_tcp:
            yield (
                f"{fault.inject} can't reach this job's collectives, which go over {over.name} ({over.why}); "
                f"{over.instead}"
            )
    if "nccl_net" in found.needs and (wrong := kept_from_plugin(env, job.nodes)):
        yield f"{fault.inject} can't reach NCCL's connections: {wrong}"


def _duration(fault: Fault, found: Any, limits: Limits, where: FaultAt) -> float | None:
    """How long the fault lasts, in seconds: its own `for` or, for a lasting fault without it, `limits.duration`. None
    if the fault has no duration."""
    most = limits.duration
    if most is not None and fault.for_ is not None and fault.for_ > most:
        raise UsageError(
            f"{where}: it lasts {fault.for_:g} s, and limits.duration allows {most:g} s; write a shorter for"
        )
    return fault.for_ if fault.for_ is not None or not registry.lasts(fault.inject) else most


def link_recoveries(faults: Sequence[PlannedFault]) -> tuple[PlannedFault, ...]:
    """Completes the triggers that wait for the recovery from another fault, with two facts about that fault.

    `lasting`: it has a duration, so the trigger must wait for its undo, too. `lethal`: its target dies, so steps that
    the target makes before its death are no recovery."""
    by_id = {fault.id: fault for fault in faults}
    linked = []
    for fault in faults:
        when = fault.trigger
        if isinstance(when, After) and when.state == "recovered" and when.fault in by_id:
            first = by_id[when.fault]
            when = replace(when, lasting=first.duration_s is not None, lethal=registry.is_lethal(first.inject))
        linked.append(replace(fault, trigger=when))
    return tuple(linked)


def check_consent(scenario: Scenario, faults: Sequence[PlannedFault], file: Path, given: Sequence[str]) -> None:
    """Raises UsageError if a fault can harm the host, and the scenario or the user does not consent to that. `given`:
    the consents of the user."""
    _check_words(given)
    for fault in faults:
        wanted = str(registry.find("injectors", fault.inject).consent)
        missing = [] if wanted in scenario.consent else [f"`consent: [{wanted}]` in the scenario"]
        missing += [] if wanted in given else [f"--consent {wanted} on the command line"]
        if wanted and missing:
            raise UsageError(
                f"{file}: fault {fault.id}: {fault.inject} can hurt the host, not only the job; "
                f"if you want that, write {' and '.join(missing)}"
            )


def _check_words(given: Sequence[str]) -> None:
    """Raises UsageError for an unknown consent, which would permit nothing."""
    if not given:
        return
    known = consents()
    if unknown := [word for word in given if word not in known]:
        near = registry.suggest(unknown[0], known)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"--consent {unknown[0]}: no fault asks for that; {hint}")


def consents() -> list[str]:
    return sorted({injector.consent for injector in registry.injectors().values() if injector.consent})
