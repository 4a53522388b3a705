"""Silent corruption of the training state: where it was bad, who could see it, and what it reached. Pure.

The state of a step is bad where its parameters' check sum differs from the twin's at the same step, or between ranks
that hold replicas. A check sum is of all bits: bad means not what it would have been, however little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.agent.check_sums import is_whole
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Evidence
from torchaos.harness.judging.landing.landings import landings
from torchaos.harness.record.history import Execution
from torchaos.harness.record.record import Record

_EXITS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)


@dataclass(frozen=True)
class Step:
    """One global step as one attempt executed it, with all its ranks."""

    number: int
    attempt: int
    over_s: float  # when its last rank was done, CLOCK_MONOTONIC
    ranks: Mapping[int, Execution]

    @property
    def replicas_differ(self) -> bool | None:
        """None where they can't be compared: unseen, or spread over the ranks."""
        sums = [one.parameters for one in self.ranks.values()]
        if len(sums) < 2 or not all(one is not None and is_whole(one) for one in sums):
            return None
        return len(set(sums)) > 1

    def differs_from(self, twin: Mapping[int, Execution] | None) -> bool | None:
        """From the twin's, rank by rank; None where a rank of either was not seen."""
        pairs = [(one.parameters, twin[rank].parameters) for rank, one in self.ranks.items() if twin and rank in twin]
        if not pairs or any(None in pair for pair in pairs):
            return None
        return any(ours != theirs for ours, theirs in pairs)

    @property
    def losses(self) -> list[float]:
        return [loss for one in self.ranks.values() for loss in one.losses if loss is not None]


def steps_of(record: Record) -> list[Step]:
    """Every step that was executed, those that were done again too, in order of time."""
    found: dict[tuple[int, int], dict[int, Execution]] = {}
    for one in record.history.executions:
        if one.global_step is not None:
            found.setdefault((one.attempt, one.global_step), {})[one.rank] = one
    steps = (
        Step(number, attempt, max(one.mono_s for one in ranks.values()), ranks)
        for (attempt, number), ranks in found.items()
    )
    return sorted(steps, key=lambda step: (step.attempt, step.number))


def bad_steps(record: Record, twins: Sequence[Record]) -> list[Step] | None:
    """The steps after which the state was bad; None where no step's state could be told."""
    theirs = [twin.history.by_step() for twin in twins]
    verdicts = [(step, _differs(step, theirs), step.replicas_differ) for step in steps_of(record)]
    if all(by_twin is None and by_replica is None for _step, by_twin, by_replica in verdicts):
        return None
    return [step for step, by_twin, by_replica in verdicts if by_twin or by_replica]


def _differs(step: Step, twins: Sequence[Mapping[int, Mapping[int, Execution]]]) -> bool | None:
    """From every twin: what one of them has too is no harm."""
    found = [step.differs_from(twin.get(step.number)) for twin in twins]
    return None if not found or None in found else all(found)


@dataclass(frozen=True)
class Sighting:
    """The first time that somebody could tell, or did."""

    who: str  # replicas, norm, loss, job
    step: int | None
    at_s: float


def sightings(record: Record, since_s: float) -> list[Sighting]:
    """Who saw it first, in order of time: the three watches of any trainer, and the job itself, by leaving."""
    steps, found = steps_of(record), []
    later = [step for step in steps if step.over_s >= since_s]
    apart = next((step for step in later if step.replicas_differ), None)
    if apart is not None:
        found.append(Sighting("replicas", apart.number, apart.over_s))
    blown = next((step for step in later if any(not math.isfinite(loss) for loss in step.losses)), None)
    if blown is not None:
        found.append(Sighting("loss", blown.number, blown.over_s))
    spike = next(_spikes(record, since_s), None)
    if spike is not None:
        found.append(Sighting("norm", _under_way(record, spike), spike.mono_s))
    left = next((event for event in record.of_kind(*_EXITS) if event.mono_s >= since_s and _is_refusal(event)), None)
    others = [one for one in landings(record) if left and since_s < one.at_s <= left.mono_s]
    if left is not None and not others:  # else it may have left because of them
        done = [step.number for step in steps if step.over_s <= left.mono_s]
        found.append(Sighting("job", max(done, default=0) + 1, left.mono_s))
    return sorted(found, key=lambda one: one.at_s)


def _is_refusal(event: Event) -> bool:
    """A rank that ends with an error of its own: not by a signal or told by one (128 and more), nor as it is done."""
    code = event.data.get("exit_code")
    return isinstance(code, int) and 0 < code < 128


def _spikes(record: Record, since_s: float) -> Iterator[Event]:
    """Each time that a rank's agent saw a gradient norm of 10 times its rolling mean, or one that is not finite."""
    return (e for e in record.of_kind(Kind.NOTE) if "norm" in e.data and e.mono_s >= since_s)


def _under_way(record: Record, event: Event) -> int | None:
    done = record.history.steps_done(event.rank, event.attempt, event.mono_s)
    return None if done is None else done + 1


def seen_by_others(record: Record, fault: str) -> Evidence | None:
    """From the landing on, another rank's parameters are not the target's any more, or it saw a gradient that can't be
    right; until then neither was so."""
    landing = next((one for one in landings(record) if one.fault == fault), None)
    effect = next(record.of_fault(fault, Kind.EFFECT), None)
    if landing is None or effect is None:
        return None
    spikes = [one for one in _spikes(record, 0.0) if one.rank not in landing.ranks]
    if spikes and spikes[0].mono_s >= landing.at_s:
        what = f"{effect.data['effect']}; on rank {spikes[0].rank}, which was not hit, {spikes[0].data['text']}"
        return Evidence(what, ((spikes[0].source, spikes[0].seq),))
    first = next((step for step in steps_of(record) if step.replicas_differ), None)
    if first is None or first.over_s < landing.at_s or not _others_took_part(first, landing.ranks):
        return None
    what = f"{effect.data['effect']}; after step {first.number} the ranks no longer hold the same parameters"
    return Evidence(what, ((effect.source, effect.seq),))


def seen_by_twin(record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
    """From the landing on, a rank that was not hit has other parameters than in the twin; until then it had the same.
    In a job of one rank that is the target's own."""
    landing = next((one for one in landings(record) if one.fault == fault), None)
    effect = next(record.of_fault(fault, Kind.EFFECT), None)
    if landing is None or effect is None:
        return None
    theirs = twins[0].history.by_step()
    first = next((step for step in steps_of(record) if step.differs_from(theirs.get(step.number))), None)
    if first is None or first.over_s < landing.at_s:
        return None
    alone = len(first.ranks) == 1
    others = [
        rank for rank, one in first.ranks.items()
        if (alone or rank not in landing.ranks) and one.parameters != theirs[first.number][rank].parameters
    ]  # fmt: skip
    if not others:
        return None
    what = (
        f"{effect.data['effect']}; after step {first.number} the parameters of rank {others[0]} differ from the twin's"
    )
    return Evidence(what, ((effect.source, effect.seq),))


def _others_took_part(step: Step, hit: frozenset[int]) -> bool:
    return bool(set(step.ranks) - hit)
