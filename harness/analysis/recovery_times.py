"""How long each part of the recovery from each fault took, in seconds, and the times in which a job was recovering.

Faults whose recoveries overlap interrupted the job once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torchaos.harness import registry
from torchaos.harness.analysis.caught_up import (
    End,
    growths,
    highest_up_to,
    lasted_s,
    over_s,
    owed,
    put_back,
    steps_beyond,
    went_on,
)
from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of
from torchaos.harness.analysis.checkpointing.save_schedule import standstill
from torchaos.harness.analysis.ending import final_step, never_ends_in_time, own_exit_code
from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Attempt, History
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Recovery


@dataclass(frozen=True)
class Interruption:
    """The time (CLOCK_MONOTONIC) from a fault until the job had recovered from this fault and from all that came
    meanwhile."""

    begun_s: float
    ended_s: float
    recoveries: tuple[Recovery, ...]

    @property
    def took_s(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def restarted_after_s(self) -> float | None:
        """The seconds until the first step of its last restart. None if the job went on without a restart, or if
        nothing shows where it resumed."""
        back = [
            _at(one) + at for one in self.recoveries if one.lost_steps is not None and (at := one.parts["first_step"])
        ]
        return max(back) - self.begun_s if back else None


def interruptions(run: Record, found: Sequence[Recovery]) -> list[Interruption]:
    """The interruptions by these recoveries, in order of time. A recovery that never ended lasts until the run's last
    event."""
    over_s = run.events[-1].mono_s if run.events else 0.0
    merged: list[Interruption] = []
    for one in sorted(found, key=_at):
        took_s = one.parts["caught_up"]
        now = Interruption(_at(one), max(_at(one), over_s) if took_s is None else _at(one) + took_s, (one,))
        if merged and now.begun_s <= merged[-1].ended_s:
            last = merged.pop()
            now = Interruption(last.begun_s, max(last.ended_s, now.ended_s), (*last.recoveries, one))
        merged.append(now)
    return merged


def invalid_s(run: Record, found: Sequence[Interruption]) -> float:
    """The seconds in which training was interrupted, or stood still to write a checkpoint. A checkpoint that is written
    in an interruption counts only once."""
    begun: dict[tuple[int, int], float] = {}
    for save in run.history.saves:
        key = (save.attempt, save.local_step)
        begun[key] = min(begun.get(key, save.begun_s), save.begun_s)
    outside = (
        blocked for key, blocked in standstill(run.history).blocked.items()
        if not any(one.begun_s <= begun[key] < one.ended_s for one in found)
    )  # fmt: skip
    return sum(one.took_s for one in found) + sum(outside)


def _at(recovery: Recovery) -> float:
    return recovery.at_s or 0.0


# In the order in which they happen; seconds since the fault was applied.
PARTS = (
    "felt", "detected", "torn_down", "rendezvous", "workers_up", "imported", "prepared", "joined", "set_up",
    "restored", "first_step", "caught_up",
)  # fmt: skip

_DETECTED = (Kind.ELASTIC_FAILURE, Kind.ELASTIC_TEARDOWN, Kind.JOB_EXITED)


def recoveries(record: Record, twins: Sequence[Record] = ()) -> list[Recovery]:
    """The recovery from each landing, in order of time. A fault that landed in several attempts has several
    recoveries."""
    return [recovery_from(record, landing, twins) for landing in landings(record)]


def end_of(record: Record, landing: Landing, twins: Sequence[Record] = ()) -> End | None:
    """When, and how, the recovery from a fault ended. `landing`: where and when the fault was applied. None if training
    never continued."""
    planned = _planned(record, landing)
    lethal = planned is not None and registry.is_lethal(planned.inject)
    lasting, histories = _is_lasting(planned), [twin.history for twin in twins]
    return went_on(record, landing, lethal=lethal, lasting=lasting, twins=histories)


def _planned(record: Record, landing: Landing) -> PlannedFault | None:
    return next((fault for fault in record.plan.faults if fault.id == landing.fault), None)


def _is_lasting(fault: PlannedFault | None) -> bool:
    return fault is not None and (fault.duration_s is not None or registry.lasts(fault.inject))


def _ends_with_target(fault: PlannedFault | None) -> bool:
    """Whether the fault ends with the process that it hit."""
    return fault is not None and (fault.where == "rank" or registry.family_of(fault.inject) in ("process", "straggle"))


def on_until_s(record: Record, landing: Landing) -> float:
    """When the fault was over (CLOCK_MONOTONIC); infinite if it stayed."""
    return over_s(record, landing, _ends_with_target(_planned(record, landing)))


def why_moot(record: Record, fault: str, twins: Sequence[Record] = ()) -> str | None:
    """Why a missing recovery is no failure, as a clause: the job was finished when the fault came, or would not have
    ended in time without the fault either. None if it is a failure: the job still had steps to make, or its last
    checkpoint is not whole."""
    if too_short := never_ends_in_time(record):
        return too_short
    reached = record.history.highest_step() or 0
    due = final_step(twins[0]) if twins else None
    if own_exit_code(record) != 0 or (due is not None and reached < due):
        return None
    for landing in landings(record):
        if landing.fault == fault and (unseen := unseen_after(record, landing)):
            who = f"rank {', '.join(map(str, unseen))}"
            return (
                f"no step of {who} was seen after it, though other ranks made steps until step {reached} and the job "
                "ended with exit code 0"
            )
    checkpoints = checkpoints_of(record)
    if not _unsaved(record, fault, twins) or (checkpoints and _entries(twins[0], reached) <= _entries(record, reached)):
        return f"it came after the last step ({reached}), so there was nothing left to recover"
    if checkpoints is None:
        return (
            f"it came during the save after the last step ({reached}), and nothing shows whether that checkpoint is "
            "whole; the assertion checkpoint_integrity would show it"
        )
    return None


def unseen_after(record: Record, landing: Landing) -> tuple[int, ...]:
    """The ranks that the fault hit and whose later steps in that attempt were perhaps not seen; sorted. Empty unless
    other ranks show that steps are missing: they later made a step at least two above the highest step before the
    fault, in the last attempt, and the job ended with exit code 0."""
    history = record.history
    steps = history.executions.of_attempt(landing.attempt)
    later = steps.at(steps.mono_s > landing.at_s)
    beyond = later.at(later.global_step > (history.highest_step(before_s=landing.at_s) or 0) + 1)
    ended_well = own_exit_code(record) == 0 and history.attempts[-1].number == landing.attempt
    lost = landing.ranks - set(later.rank.tolist())
    return tuple(sorted(lost)) if ended_well and len(beyond) else ()


def _entries(record: Record, step: int) -> set[str]:
    """The paths of the good checkpoints of a step, and the names of all their entries."""
    good = [checkpoint for checkpoint in checkpoints_of(record) or () if checkpoint.good and checkpoint.step == step]
    return {name for checkpoint in good for name in (checkpoint.path, *checkpoint.tensors, *checkpoint.values)}


def _unsaved(record: Record, fault: str, twins: Sequence[Record]) -> bool:
    """Whether the fault came after the last step, and before the last checkpoint was saved."""
    of_twins = [twin.history for twin in twins]
    return any(owed(record.history, landing.at_s, of_twins) for landing in landings(record) if landing.fault == fault)


def never_in_words(record: Record, fault: str, twins: Sequence[Record] = ()) -> str:
    """What the job failed to do after a fault from which it never recovered, as a clause without its subject."""
    reached = record.history.highest_step()
    if _unsaved(record, fault, twins):
        return f"never completed the save after step {reached}, its last, which was due when the fault came"
    last = [landing for landing in landings(record) if landing.fault == fault][-1:]
    if last and record.history.attempts[-1].number == last[0].attempt and steps_beyond(record, last[0]):
        return f"made no further step after step {reached}, until the run was ended"
    return f"never got past step {reached}, the highest it had reached before the fault"


def recovery_from(record: Record, landing: Landing, twins: Sequence[Record] = ()) -> Recovery:
    """The parts of the recovery from a landing that were seen (see PARTS), and the steps that were lost."""
    planned = _planned(record, landing)
    lasted = lasted_s(record, landing, _ends_with_target(planned)) if _is_lasting(planned) else None
    return replace(_parts(record, landing, twins), lasted_s=lasted)


def _parts(record: Record, landing: Landing, twins: Sequence[Record]) -> Recovery:
    history, after = record.history, _After(record.beside_steps, landing.at_s)
    effect = after.first(lambda e: e.kind is Kind.EFFECT and e.data["fault"] == landing.fault)
    felt = _earliest(after.first(lambda e: _is_end_of(e, landing)), effect)
    end = end_of(record, landing, twins)
    if end is not None and end.attempt == landing.attempt:  # then a process that ended later had another cause
        felt = felt if felt is not None and felt <= end.mono_s else effect
        parts, lost = _put_back(record, landing)
        return _recovery(landing, {"felt": felt, **parts, "caught_up": end.mono_s}, lost)
    before = next((attempt for attempt in history.attempts if attempt.number == landing.attempt), None)
    reached = highest_up_to(history, landing.attempt)
    later = [attempt for attempt in history.attempts if attempt.number > landing.attempt]
    until_s = later[0].started_s if later else float("inf")
    detected = after.first(lambda e: e.kind in _DETECTED and e.mono_s <= until_s)
    seen = {"felt": felt, "detected": detected, "torn_down": _end_after(before, landing.at_s)}
    made_steps = history.executions.attempts
    came_back = next((attempt for attempt in later if attempt.number in made_steps), later[0] if later else None)
    if came_back is None:
        if unseen := unseen_after(record, landing):
            return replace(_recovery(landing, {}, None), unseen=unseen)
        return _recovery(landing, seen, None)
    seen.update(_parts_of(came_back, history, after))
    seen["caught_up"] = end.mono_s if end else None
    return _recovery(landing, seen, _lost(history, landing.attempt, reached, _again(record, landing, end)))


def _put_back(record: Record, landing: Landing) -> tuple[dict[str, float | None], int | None]:
    """The parts of a recovery within the attempt that was hit, and the number of lost steps. In such a recovery, the
    attempt loaded a checkpoint again, or put back a state that it had kept in memory (the time of that is not seen),
    and continued from it. No parts and 0 steps if it did neither."""
    back = put_back(record, landing)
    if not back:
        return {}, 0
    own = record.history.executions.of_attempt(landing.attempt)
    own = own.at(own.column("segment") >= back[0].after)
    reached = record.history.highest_step(before_s=back[-1].started_s) or 0
    bases = [segment.base for segment in back if segment.base is not None]
    restored_s = None if back[-1].in_memory else back[-1].started_s
    begun = [e.mono_s for e in record.of_kind(Kind.LOAD_BEGIN) if e.attempt == landing.attempt]
    begun = [at_s for at_s in begun if restored_s is not None and landing.at_s < at_s <= restored_s]
    seen = {"set_up": max(begun, default=None), "restored": restored_s, "first_step": own.first_s()}
    return seen, max(0, reached - min(bases)) if bases else None


def _parts_of(back: Attempt, history: History, after: _After) -> dict[str, float | None]:
    """The parts of a recovery in the attempt that made steps again, from its rendezvous to its first step."""
    first = history.executions.of_attempt(back.number).first_s()
    loads = [load for load in history.loads if load.attempt == back.number and load.ok]
    loads = [load for load in loads if first is None or load.mono_s <= first]
    ups = [process.up_s for process in back.ranks.values()]
    whole = len(ups) >= back.world_size
    up = max(ups) if ups and whole else None
    return {
        "rendezvous": after.last(_is_rendezvous, up) or after.last(_is_start, up),
        "workers_up": up,
        "imported": _by_all(back, after, lambda e: e.kind is Kind.AGENT_STARTED and bool(e.data["torch"])),
        "prepared": _by_all(back, after, _is_join, lambda e: e.mono_s - e.data["blocked_s"]),
        "joined": _by_all(back, after, _is_join),
        "set_up": _by_all(
            back,
            after,
            lambda e: e.kind is Kind.LOAD_BEGIN and (first is None or e.mono_s <= first),
            of={load.rank for load in loads},
        ),
        "restored": max((load.mono_s for load in loads), default=None),
        "first_step": first,
    }


def _by_all(
    back: Attempt, after: _After, wanted: Callable[[Event], bool],
    at: Callable[[Event], float] = lambda event: event.mono_s, of: Collection[int] = (),
) -> float | None:  # fmt: skip
    """The time at which the last rank had its first wanted event. None if a rank had no such event. `at`: gives the
    time (CLOCK_MONOTONIC) of an event. `of`: the ranks that count, because some jobs load on one rank alone; by default
    all of the attempt."""
    came: dict[int, float] = {}
    for event in after.events:
        if event.attempt == back.number and event.rank is not None and wanted(event):
            came.setdefault(event.rank, at(event))
    return max(came.values()) if came and set(of or back.ranks) <= came.keys() else None


def _again(record: Record, landing: Landing, end: End | None) -> list[int]:
    """The later attempts that ended before training continued, because the job grew again after the fault."""
    mine = [attempt for attempt, owner in growths(record).items() if owner == landing]
    return [attempt for attempt in mine if end is None or attempt < end.attempt]


def _lost(history: History, attempt: int, reached: int | None, again: Sequence[int] = ()) -> int | None:
    """The number of lost steps: from the step from which the next attempt resumed, up to `reached`. `again`: later
    attempts that ended as well; their lost steps are added. None if not known."""
    more = [_lost(history, number, highest_up_to(history, number)) for number in again]
    if more:
        first = _lost(history, attempt, reached)
        return None if first is None or None in more else first + sum(lost or 0 for lost in more)
    bases = [later.base for later in history.attempts if later.number > attempt and later.first_step is not None]
    if reached is None:
        return 0
    return None if not bases or bases[0] is None else max(0, reached - bases[0])


def _is_end_of(event: Event, landing: Landing) -> bool:
    if event.kind is Kind.JOB_EXITED:
        return not landing.ranks
    if event.kind is not Kind.RANK_EXITED:
        return False
    if landing.pids and event.data.get("pid") is not None:
        return event.data["pid"] in landing.pids
    return event.rank in landing.ranks or not landing.ranks


def _is_join(event: Event) -> bool:
    return event.kind is Kind.GROUP_JOINED


def _is_rendezvous(event: Event) -> bool:
    return event.kind is Kind.ELASTIC_RENDEZVOUS and bool(event.data["done"])


def _is_start(event: Event) -> bool:
    return event.kind is Kind.ELASTIC_WORKER and event.data["state"] == "START"


def _end_after(attempt: Attempt | None, at_s: float) -> float | None:
    ended = attempt.ended_s if attempt else None
    return ended if ended is not None and ended >= at_s else None


def _recovery(landing: Landing, seen: dict[str, float | None], lost: int | None) -> Recovery:
    parts = {part: seen.get(part) for part in PARTS}
    since = {part: None if at is None else round(at - landing.at_s, 6) for part, at in parts.items()}
    return Recovery(landing.fault, since, lost, at_s=landing.at_s)


def _earliest(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)


@dataclass(frozen=True)
class _After:
    """The times of events since `at_s`, CLOCK_MONOTONIC."""

    events: Sequence[Event]
    at_s: float

    def _times(self, wanted: Callable[[Event], bool]) -> Iterable[float]:
        return (event.mono_s for event in self.events if event.mono_s >= self.at_s and wanted(event))

    def first(self, wanted: Callable[[Event], bool]) -> float | None:
        return min(self._times(wanted), default=None)

    def last(self, wanted: Callable[[Event], bool], until_s: float | None) -> float | None:
        return max((at for at in self._times(wanted) if until_s is None or at <= until_s), default=None)
