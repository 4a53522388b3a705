"""Resolves the target and the trigger of a fault. Values that the scenario leaves open are drawn at random from the
seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.agent.agent_plan import Collectives, Moment
from torchaos.harness.agent.wire import Phase
from torchaos.harness.interfaces import Target, UsageError
from torchaos.harness.record.plan import After, PlannedJob
from torchaos.harness.scenario.grammar import COLLECTIVE, Between, Fault, Limits, When
from torchaos.harness.scenario.grammar import Target as Aim
from torchaos.harness.scenario.yaml_source import read

# "any" draws from the phases that every training loop enters in every step.
_DRAWN_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True)
class FaultAt:
    """Where a fault is in its file, as text for a message. The file is read only when there is a message."""

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
    """The ranks and nodes that a fault hits. `where`: its place or name, for messages. Raises UsageError if the target
    does not exist, or if no rank or node is left to draw."""
    target = fault.target
    if target is None:
        return Target(())
    per_node = job.per_node
    nodes = sorted(set(range(job.nodes)) - set(limits.never.nodes))
    there, never = set(nodes), set(limits.never.ranks)
    world = [rank for rank in range(job.world_size) if rank not in never and rank // per_node in there]
    if (target.replica is not None or job.replicas > 1) and (found := _of_replica(target, job, where, draw, world)):
        return found
    drawn = target.count or target.percent or "any" in (target.rank, target.node)
    if drawn and not (nodes and world):
        raise UsageError(f"{where}: limits.never leaves no rank to draw from; shorten it")
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
        if target.local_rank >= per_node:
            raise UsageError(
                f"{where}: there is no local rank {target.local_rank}; each node has {per_node}, counted from 0"
            )
        ranks = [rank for rank in ranks if rank % per_node == target.local_rank]
    elif target.count is not None or target.percent is not None:
        count = target.count or max(1, math.floor(job.world_size * (target.percent or 0) / 100))
        if count > len(world):
            spared = "" if len(world) == job.world_size else f", less those of limits.never: {len(world)}"
            raise UsageError(f"{where}: it needs {count} ranks; the job has {job.world_size}{spared}")
        ranks = draw.sample(world, count)
    chosen = tuple(sorted(set(ranks)))
    if chosen[-1] >= job.world_size:
        raise UsageError(f"{where}: there is no rank {chosen[-1]}; the job has {job.world_size}, counted from 0")
    return Target(chosen)


def _of_replica(
    target: Aim, job: PlannedJob, where: object, draw: random.Random, world: Sequence[int]
) -> Target | None:  # fmt: skip
    """The target ranks of one replica, by their numbers in the whole job. None if the target names neither a replica
    nor a rank by its number. Raises UsageError for a target that does not exist."""
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
    """The trigger of a fault. `usual`: the phase in which this kind of fault lands if the scenario names none."""
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
