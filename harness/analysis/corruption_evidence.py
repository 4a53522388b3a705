"""Silent corruption of the training state: the steps after which the state was bad, and the witness that could see it
first.

The state after a step is bad if the check sum of the parameters differs from the twin's after the same step, or differs
between ranks that hold replicas. A check sum covers all bits, so the smallest difference counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.interfaces import Evidence
from torchaos.harness.protocol.check_sums import is_whole
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Execution
from torchaos.harness.record.record import Record

_EXITS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)


@dataclass(frozen=True)
class Step:
    """One global step as one attempt executed it on all its ranks."""

    number: int
    attempt: int
    over_s: float  # when the last rank had finished it, CLOCK_MONOTONIC
    ranks: Mapping[int, Execution]

    @property
    def replicas_differ(self) -> bool | None:
        """Whether the ranks hold different parameters. None if they can't be compared, because a rank's parameters were
        not seen or are only a part of the model."""
        sums = [execution.parameters for execution in self.ranks.values()]
        if len(sums) < 2 or not all(each is not None and is_whole(each) for each in sums):
            return None
        return len(set(sums)) > 1

    def differs_from(self, twin: Mapping[int, Execution] | None) -> bool | None:
        """Whether the parameters of a rank differ from the twin's. None if a rank's parameters were not seen, in the
        run or in the twin."""
        pairs = [
            (execution.parameters, twin[rank].parameters)
            for rank, execution in self.ranks.items()
            if twin and rank in twin
        ]
        if not pairs or any(None in pair for pair in pairs):
            return None
        return any(ours != theirs for ours, theirs in pairs)

    @property
    def losses(self) -> list[float]:
        return [loss for execution in self.ranks.values() for loss in execution.losses if loss is not None]


def steps_of(record: Record) -> list[Step]:
    """All steps that were executed, including steps that were executed again later, in order of attempts and steps."""
    found: dict[tuple[int, int], dict[int, Execution]] = {}
    for execution in record.history.executions:
        if execution.global_step is not None:
            found.setdefault((execution.attempt, execution.global_step), {})[execution.rank] = execution
    steps = (
        Step(number, attempt, max(execution.mono_s for execution in ranks.values()), ranks)
        for (attempt, number), ranks in found.items()
    )
    return sorted(steps, key=lambda step: (step.attempt, step.number))


def bad_steps(record: Record, twins: Sequence[Record]) -> list[Step] | None:
    """The steps after which the state was bad. None if the state is not known after any step."""
    theirs = [twin.history.by_step() for twin in twins]
    verdicts = [(step, _differs(step, theirs), step.replicas_differ) for step in steps_of(record)]
    if all(by_twin is None and by_replica is None for _step, by_twin, by_replica in verdicts):
        return None
    return [step for step, by_twin, by_replica in verdicts if by_twin or by_replica]


def _differs(step: Step, twins: Sequence[Mapping[int, Mapping[int, Execution]]]) -> bool | None:
    """Whether the step differs from every twin. A state that one of the twins has too is not bad."""
    found = [step.differs_from(twin.get(step.number)) for twin in twins]
    return None if not found or None in found else all(found)


@dataclass(frozen=True)
class Sighting:
    """The first time that one kind of witness showed the corruption."""

    who: str  # "replicas", "norm", "loss" or "job"
    step: int | None  # global
    at_s: float
    back_to: int | None = None  # the job did not end the attempt, but went back to the state after this step


def sightings(record: Record, since_s: float, twins: Sequence[Record] = ()) -> list[Sighting]:
    """The first time for each witness of the corruption since `since_s`, in order of time. The witnesses are: replicas
    that differ, a loss that is not finite, a spike of the gradient norm, and the job: a rank that ended itself with an
    error, or ranks that went back to an earlier state, which they do in no twin."""
    steps, found = steps_of(record), []
    later = [step for step in steps if step.over_s >= since_s]
    differing = next((step for step in later if step.replicas_differ), None)
    if differing is not None:
        found.append(Sighting("replicas", differing.number, differing.over_s))
    not_finite = next((step for step in later if any(not math.isfinite(loss) for loss in step.losses)), None)
    if not_finite is not None:
        found.append(Sighting("loss", not_finite.number, not_finite.over_s))
    spike = next(_spikes(record, since_s), None)
    if spike is not None:
        found.append(Sighting("norm", _under_way(record, spike), spike.mono_s))
    usual = any(
        part.after for twin in twins for part in twin.history.segments
    )  # the job goes back without a fault, too
    by_job = [*_refusals(record, since_s, steps), *(() if usual else _returns(record, since_s))]
    own = min(by_job, key=lambda sighting: sighting.at_s, default=None)
    if own and not any(since_s < landing.at_s <= own.at_s for landing in landings(record)):
        found.append(own)  # otherwise another fault may be the reason
    return sorted(found, key=lambda sighting: sighting.at_s)


def _refusals(record: Record, since_s: float, steps: Sequence[Step]) -> Iterator[Sighting]:
    for event in record.of_kind(*_EXITS):
        if event.mono_s >= since_s and _is_refusal(event):
            done = [step.number for step in steps if step.over_s <= event.mono_s]
            yield Sighting("job", max(done, default=0) + 1, event.mono_s)


def _returns(record: Record, since_s: float) -> Iterator[Sighting]:
    history = record.history
    for attempt in history.attempts:
        for segment in history.put_back(attempt.number, since_s):
            first_s = history.of_segment(segment.number, segment.after).first_s()
            reached = history.highest_step(before_s=first_s) if first_s is not None else None
            if first_s is not None and reached is not None and segment.base is not None and segment.base < reached:
                yield Sighting("job", reached + 1, first_s, segment.base)


def _is_refusal(event: Event) -> bool:
    """Whether a rank ended itself with an error. An exit code that is negative, or 128 or more, means that a signal
    killed it; 0 means success."""
    code = event.data.get("exit_code")
    return isinstance(code, int) and 0 < code < 128


def _spikes(record: Record, since_s: float) -> Iterator[Event]:
    """The notes of agents about a gradient norm that is not finite or is 10 times its rolling mean."""
    return (e for e in record.of_kind(Kind.NOTE) if "norm" in e.data and e.mono_s >= since_s)


def _under_way(record: Record, event: Event) -> int | None:
    done = record.history.steps_done(event.rank, event.attempt, event.mono_s)
    return None if done is None else done + 1


def seen_by_others(record: Record, fault: str) -> Evidence | None:
    """Evidence from ranks that were not hit: after the landing, and not before, the ranks hold different parameters, or
    a rank that was not hit saw a spike of the gradient norm."""
    landing = next((landing for landing in landings(record) if landing.fault == fault), None)
    effect = next(record.of_fault(fault, Kind.EFFECT), None)
    if landing is None or effect is None:
        return None
    spikes = [note for note in _spikes(record, 0.0) if note.rank not in landing.ranks]
    if spikes and spikes[0].mono_s >= landing.at_s:
        words = f"{effect.data['effect']}; on rank {spikes[0].rank}, which was not hit, {spikes[0].data['text']}"
        return Evidence.of(words, spikes[0])
    first = next((step for step in steps_of(record) if step.replicas_differ), None)
    if first is None or first.over_s < landing.at_s or set(first.ranks) <= landing.ranks:
        return None
    words = f"{effect.data['effect']}; after step {first.number} the ranks no longer hold the same parameters"
    return Evidence.of(words, effect)


def seen_by_twin(record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
    """Evidence from the first twin: after the landing, and not before, a rank that was not hit has other parameters
    than in the twin. In a job of one rank, the target itself counts."""
    landing = next((landing for landing in landings(record) if landing.fault == fault), None)
    effect = next(record.of_fault(fault, Kind.EFFECT), None)
    if landing is None or effect is None:
        return None
    theirs = twins[0].history.by_step()
    first = next((step for step in steps_of(record) if step.differs_from(theirs.get(step.number))), None)
    if first is None or first.over_s < landing.at_s:
        return None
    alone = len(first.ranks) == 1
    others = [
        rank for rank, done in first.ranks.items()
        if (alone or rank not in landing.ranks) and done.parameters != theirs[first.number][rank].parameters
    ]  # fmt: skip
    if not others:
        return None
    words = (
        f"{effect.data['effect']}; after step {first.number} the parameters of rank {others[0]} differ from the twin's"
    )
    return Evidence.of(words, effect)
