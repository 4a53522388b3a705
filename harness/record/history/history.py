"""From the events of a run to the final history. This is the only place where global steps are made. Pure.

Within an attempt the agent counts steps from 1. An attempt has a base: the number of global steps before its first step
(see step_witnesses.py). If it loads a checkpoint between two steps, it has another base from there on (see
step_numbering.py). The steps on one base are a segment. A step counts, unless a later segment that has steps began
before this step.

A fault may break off a step on only some ranks, before the whole job goes back to an earlier state within the process.
From there on, the agents of these ranks count one step less than the agents of the other ranks; `_with_unfinished`
corrects this."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.merged import Merged
from torchaos.harness.record.history import attempts, saves_and_loads
from torchaos.harness.record.history.attempts import Attempt, Segment
from torchaos.harness.record.history.saves_and_loads import Load, Save
from torchaos.harness.record.history.snapshots import Snapshots
from torchaos.harness.record.history.step_evidence import LOG, RECORD, Witness
from torchaos.harness.record.history.step_numbering import Lines, Placing
from torchaos.harness.record.steps import Execution, Executions, StepTable
from torchaos.harness.record.steps.execution import floats
from torchaos.harness.record.steps.executions import UNPLACED

Array = npt.NDArray[Any]
_REPORTING = ("steps", "checkpoints", "imported")  # hooks of the agent
_DEATHS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE, Kind.NODE_EXITED, Kind.JOB_EXITED)
_STARTED_S = 60.0  # seconds after which an agent has started, if there is one


@dataclass(frozen=True)
class History:
    attempts: tuple[Attempt, ...]
    executions: Executions  # in order of attempt, then of time
    saves: tuple[Save, ...]
    loads: tuple[Load, ...]
    source: Literal["agent", "log", "none"]  # who reported the steps
    uneven: tuple[
        int, ...
    ] = ()  # steps of each rank in an attempt that ended well, if these differ: then none has a global number
    program_returns: frozenset[int] = frozenset()  # global steps after which the program put an older state back

    @classmethod
    def of(
        cls, events: Sequence[Event], twin: History | None = None, peers: Sequence[Executions] = (),
        hit_elsewhere_s: Sequence[float] = (), of_program: Collection[int] = (),
    ) -> History:  # fmt: skip
        """The history of these events, which may be in any order. `twin`: helps to find the steps: samples, losses and
        counters are compared with its steps too. `peers`: the final steps of other replicas of the job, with the same
        use of their parameters. `hit_elsewhere_s`: when faults hit other replicas (seconds of CLOCK_MONOTONIC).
        `of_program`: the `program_returns` of a twin."""
        whole = Merged.of(events)
        ordered, seen = _with_unfinished(_with_first_steps(whole), whole.steps_made.once_each())
        found = attempts.read(ordered)
        saves, loads = saves_and_loads.without_exchanged(
            saves_and_loads.read_saves(ordered, seen), saves_and_loads.read_loads(ordered)
        )
        if len(seen):
            uneven = _uneven(ordered, found, seen) or (twin.uneven if twin else ())
            runs = [(found, seen), *([(twin.attempts, twin.executions)] if twin else [])] if uneven else []
            together = any(_end_together(*run, len(uneven)) for run in runs) or all(
                _keep_step(steps.of_attempt(number)) for _attempts, steps in runs for number in steps.attempts
            )
            placing = Placing(
                found, {each.number: seen.of_attempt(each.number) for each in found}, _by_attempt(saves), loads,
                _lines(ordered), [twin.by_step().executions] if twin else [],
                ("at the end" if together else "all the time") if uneven else "",
                _ahead(ordered), _blind(ordered, found), Snapshots.of(ordered), peers,
                hits=[event for event in ordered if event.kind in (Kind.APPLYING, Kind.APPLIED)],
                hit_elsewhere_s=hit_elsewhere_s, of_program=of_program,
            )  # fmt: skip
            placed = tuple(placing.place(attempt) for attempt in found)
            return cls(
                placed, placing.all_placed(seen), tuple(placing.saved), tuple(loads), "agent", uneven,
                frozenset(placing.counted_on),
            )  # fmt: skip
        logged = _steps_of_log(ordered, [(each.number, each.started_s) for each in found])
        if logged and not found:
            found = [Attempt(0, 0, {}, logged[0].mono_s, None, 0)]
        return cls(_from_log(found, logged), Executions.of(logged), (), (), "log" if logged else "none")

    def attempt(self, number: int) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.number == number), None)

    def attempt_at(self, mono_s: float) -> Attempt | None:
        """The last attempt that had started by that time. None if there is none."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.started_s <= mono_s), None)

    @cached_property
    def unplaced(self) -> tuple[int, ...]:
        """Attempts with steps whose global numbers are not known."""
        return tuple(np.unique(self.executions.attempt[self.executions.global_step == UNPLACED]).tolist())

    def counting(self) -> Mapping[tuple[int, int], Execution]:
        """The final history: by (global step, rank), in order of steps."""
        return self._counting.by_key()

    def by_step(self) -> StepTable:
        """The final history: by global step, then by rank."""
        return self._counting

    @cached_property
    def _counting(self) -> StepTable:
        placed = self.executions.placed
        return StepTable(placed.at(self._final(placed)).last_of("global_step", "rank"))

    def _final(self, placed: Executions) -> Array:
        """The places of the steps that no later segment undid."""
        attempt, segment, step = placed.attempt, placed.column("segment"), placed.global_step
        found, left = np.zeros(0, np.int32 if len(placed) < 2**31 else np.int64), len(placed)
        for part in self.segments:
            own = np.flatnonzero((attempt == part.number) & (segment == part.after)).astype(found.dtype)
            left -= len(own)
            if len(own) or (not left and self._put_back(part)):
                resumed = part.base if part.base is not None else int(step[own].min()) - 1
                found = np.concatenate([found[step[found] <= resumed], own])
        return found

    def _put_back(self, part: Segment) -> bool:
        """Whether a segment without steps restored an earlier state, because it loaded a checkpoint of this run. False
        if it saved a checkpoint: then it had steps that were not seen. False also if it ended successfully after it
        loaded an old checkpoint, perhaps for an evaluation."""
        saved = any(save.attempt == part.number for save in self.saves)
        if saved or part.base is None or not any(witness.name == RECORD for witness in part.witnesses):
            return False
        attempt = self.attempt(part.number)
        ended_well = attempt is not None and set(attempt.exit_codes.values()) == {0}
        had = [save.global_step or 0 for save in self.saves if save.ok and save.attempt < part.number]
        return not ended_well or part.base >= max(had, default=0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all attempts, in order."""
        return tuple(
            part
            for attempt in self.attempts
            for part in attempt.segments or (Segment(attempt.number, 0, attempt.started_s, attempt.base),)
        )

    def put_back(self, attempt: int, since_s: float, until_s: float = math.inf) -> list[Segment]:
        """The segments that an attempt began in that time, because it loaded a checkpoint again, or put back a state
        that it had kept in memory. When it put back a state from memory is only known to be after a step and before the
        end of the next step."""
        return [
            segment
            for segment in self.segments
            if segment.number == attempt and segment.after and since_s < self._latest_s(segment)
            if segment.started_s <= until_s
        ]

    def _latest_s(self, segment: Segment) -> float:
        """The latest time at which the segment may have begun."""
        if not segment.in_memory:
            return segment.started_s
        own = self.executions.of_attempt(segment.number)
        return own.at(own.column("segment") == segment.after).first_s() or segment.started_s

    def redone(self) -> list[tuple[Execution, Execution]]:
        """Each step that a rank executed again, as (first execution, repeated execution), in order of steps."""
        return list(zip(*self.repeated(), strict=True))

    def repeated(self) -> tuple[Executions, Executions]:
        """The steps in `redone`, as two sets of rows: first executions, and repeated executions."""
        placed = self.executions.placed
        parts = [(places, *_repeated(placed.at(places))) for places in placed.by_ranks()]
        none = np.zeros(0, np.int64)
        earliest = np.concatenate([none, *(places[first] for places, first, _again in parts)])
        again = np.concatenate([none, *(places[later] for places, _first, later in parts)])
        repeated = placed.at(again)
        order = np.lexsort((again, repeated.rank, repeated.global_step))
        return placed.at(earliest[order]), placed.at(again[order])

    def highest_step(self, before_s: float = inf) -> int | None:
        """The highest global step that any rank finished. `before_s`, if given, limits it to a time."""
        steps = self.executions.global_step if before_s == inf else self._until(before_s).global_step
        highest = int(steps.max(initial=UNPLACED))
        return None if highest == UNPLACED else highest

    def _until(self, before_s: float) -> Executions:
        return self.executions.at(self.executions.mono_s <= before_s)

    def steps_done(self, rank: int | None, attempt: int | None, mono_s: float) -> int | None:
        """How many global steps a rank had completed by that time. `rank`: None for the rank that had completed the
        most. None if not known."""
        life = self.attempt_at(mono_s) if attempt is None else self.attempt(attempt)
        if life is None or life.base is None:
            return None
        part = [
            segment
            for segment in self.segments
            if segment.number == life.number and self._seen_from_s(segment) <= mono_s
        ][-1:]
        base, after = (part[0].base, part[0].after) if part else (life.base, 0)
        own = self.of_segment(life.number, after)
        own = own.at((own.mono_s <= mono_s) & ((own.rank == rank) if rank is not None else True))
        return max(0, int(own.global_step.max())) if len(own) else base

    def of_segment(self, attempt: int, after: int) -> Executions:
        """The steps of an attempt in the segment that began after the first `after` steps of the attempt."""
        all_ = self.executions
        return all_.at((all_.attempt == attempt) & (all_.column("segment") == after))

    def begins_attempt(self, part: Segment) -> bool:
        """Whether the steps of an attempt begin with this segment. Steps before it only warmed up, and count for
        nothing."""
        return not any(other.number == part.number and other.after < part.after for other in self.segments)

    def _seen_from_s(self, part: Segment) -> float:
        """The time from which on events belong to the segment. No event shows when a job returns to a state in memory,
        only that it was before the end of the next step. Earlier events, such as the fault that made the job go back,
        belong to the segment before."""
        if not part.in_memory:
            return part.started_s
        first_s = self.of_segment(part.number, part.after).first_s()
        return part.started_s if first_s is None else first_s

    def before_segment(self, attempt: int, after: int) -> Executions:
        """The steps of an attempt before the segment that began after its first `after` steps."""
        number, segment = self.executions.attempt, self.executions.column("segment")
        return self.executions.at((number < attempt) | ((number == attempt) & (segment < after)))

    @property
    def last_step(self) -> int | None:
        """The last global step of the final history."""
        return max(self._counting, default=None)


def _repeated(placed: Executions) -> tuple[Array, Array]:
    """The places of the first executions and of the repeated executions of steps, in any order."""
    step, rank = placed.global_step, placed.rank
    order = np.lexsort((placed.attempt, rank, step))  # the executions of one attempt stay in order of time
    new = np.append(True, (np.diff(step[order]) != 0) | (np.diff(rank[order]) != 0))[: len(order)]
    earliest = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    again = order != earliest
    return earliest[again], order[again]


def is_down(history: History, events: Sequence[Event], at_s: float = math.inf) -> bool:
    """Whether the job was down at that time (seconds of CLOCK_MONOTONIC): the newest attempt had made no step, or one
    of its processes had died since its last step."""
    newest = history.attempt_at(at_s)
    if newest is None:
        return True
    steps = history.executions.of_attempt(newest.number)
    last = steps.at(steps.mono_s <= at_s).last_s()
    if last is None:
        return True
    since = [e for e in events if e.kind in _DEATHS and last < e.mono_s <= at_s and e.attempt in (None, newest.number)]
    return any(event.data.get("exit_code") != 0 for event in since)


def base_of(events: Sequence[Event], attempt: int) -> tuple[int | None, list[Witness]]:
    """The base of an attempt, and its witnesses. The base is the number of global steps before the attempt's first
    step, and is added to its local steps. Not counted are steps that were only a warm-up, or that the attempt has
    undone since."""
    found = History.of(events).attempt(attempt)
    if found is None or not found.segments:
        return (found.base, list(found.witnesses)) if found else (None, [])
    newest = found.segments[-1]
    return newest.global_step(0), list(newest.witnesses)


def _uneven(ordered: Sequence[Event], found: Sequence[Attempt], seen: Executions) -> tuple[int, ...]:
    """The number of steps of each rank, if these differ in an attempt that ended well, or differ by more than the last
    step in any attempt. Otherwise empty."""
    blind = {event.attempt for event in ordered if event.kind is Kind.AGENT_FAILED}
    for attempt in found:
        own = seen.of_attempt(attempt.number)
        if attempt.number in blind or not len(own):
            continue
        made = [int(own.local_step[own.rank == rank].max()) for rank in sorted(own.ranks)]
        if max(made) - min(made) > (set(attempt.exit_codes.values()) != {0}):
            return tuple(made)
    return ()


def _end_together(found: Sequence[Attempt], seen: Executions, ranks: int) -> bool:
    """Whether the ranks of this job make the same number of steps: at least `ranks` ranks did in an attempt that ended
    well. An attempt that died shows nothing: there, a rank with more steps than the others only went on until it had to
    wait, as with local SGD."""
    ended_well = [seen.of_attempt(each.number) for each in found if set(each.exit_codes.values()) == {0}]
    return any(
        len(own.ranks) >= ranks and len({int(own.local_step[own.rank == rank].max()) for rank in own.ranks}) == 1
        for own in ended_well
    )


def _keep_step(steps: Executions) -> bool:
    """Whether no rank completed a step of the attempt before all ranks had completed the previous step. Looks only at
    the steps that all ranks made."""
    local, times = steps.local_step, steps.mono_s
    last = min((int(local[steps.rank == rank].max()) for rank in steps.ranks), default=0)
    first_s, last_s = np.full(last + 1, inf), np.zeros(last + 1)
    whole = local <= last
    np.minimum.at(first_s, local[whole], times[whole])
    np.maximum.at(last_s, local[whole], times[whole])
    return bool((last_s[:-1] <= first_s[1:]).all())


def _blind(ordered: Sequence[Event], found: Sequence[Attempt]) -> set[int]:
    """The attempts whose steps or saves may not have been seen: a hook that reports them failed in a rank, or a rank
    lived for a minute or more without an agent."""
    failed = {
        event.attempt for event in ordered
        if event.kind is Kind.AGENT_FAILED and event.attempt is not None and event.data["hook"] in _REPORTING
    }  # fmt: skip
    started = {(event.attempt, event.rank) for event in ordered if event.kind is Kind.AGENT_STARTED}
    alone = {
        attempt.number for attempt in found for rank, process in attempt.ranks.items()
        if (attempt.number, rank) not in started and (process.exited_s or 0.0) > process.up_s + _STARTED_S
    }  # fmt: skip
    return failed | alone


def _with_first_steps(whole: Merged) -> list[Event]:
    """All events in order, without usual steps except the first step of each process, which shows that its rank was
    there."""
    events = [*whole.others, *(block.first for block in whole.blocks)]
    return sorted(events, key=lambda event: (event.mono_s, event.source, event.seq))


def _by_attempt(found: Iterable[Save]) -> dict[int, list[Save]]:
    sorted_out: dict[int, list[Save]] = defaultdict(list)
    for save in found:
        sorted_out[save.attempt].append(save)
    return sorted_out


def _ahead(events: Sequence[Event]) -> dict[int, dict[int, int]]:
    """By attempt and rank: by how much the optimizer's own counter is ahead of the training."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for event in events:
        if event.kind is Kind.AHEAD and event.attempt is not None and event.rank is not None:
            found[event.attempt][event.rank] = event.data["steps"]
    return found


def _lines(events: Sequence[Event]) -> Lines:
    lines = [(event.mono_s, event.data.get("step")) for event in events if event.kind is Kind.LOG_STEP]
    return [(at, step) for at, step in lines if isinstance(step, int)]


def _from_log(found: list[Attempt], logged: list[Execution]) -> tuple[Attempt, ...]:
    """The attempts, with their bases, of a job that is only known from its log. A base is known if every step has its
    own log line."""
    interval = _log_interval(logged)
    placed = []
    for attempt in found:
        steps = [execution.local_step for execution in logged if execution.attempt == attempt.number]
        if not steps:
            placed.append(attempt)
            continue
        low = min(steps)
        fits = tuple(range(max(low - interval, 0), low))
        witness = Witness(LOG, fits, f"its first line is of step {low}")
        placed.append(replace(attempt, base=witness.value, witnesses=(witness,), first_step=low, last_step=max(steps)))
    return tuple(placed)


def _steps_of_log(events: Sequence[Event], attempts: Sequence[tuple[int, float]]) -> list[Execution]:
    """The steps that the job printed, for a job without an agent. The step number in a log line is taken as the global
    step. `attempts`: (number, start in seconds), in order of time."""
    found: dict[tuple[int, int, int], Execution] = {}
    for line in events:
        if line.kind is not Kind.LOG_STEP or not isinstance(line.data.get("step"), int):
            continue
        started = [number for number, start_s in attempts if start_s <= line.mono_s]
        attempt = line.attempt if line.attempt is not None else (started[-1] if started else 0)
        step = line.data["step"]
        key = (attempt, line.rank or 0, step)
        loss, rate = floats(line.data.get("loss")), floats(line.data.get("lr"))
        lr = tuple(value for value in rate if value is not None)
        earlier = found.get(key)
        if earlier is None:
            found[key] = Execution(line.rank or 0, attempt, step, line.mono_s, step, losses=loss, lr=lr)
    return list(found.values())


def _log_interval(executions: Iterable[Execution]) -> int:
    """The usual number of steps between two log lines."""
    by_attempt: dict[int, set[int]] = defaultdict(set)
    for execution in executions:
        by_attempt[execution.attempt].add(execution.local_step)
    gaps = Counter(b - a for steps in by_attempt.values() for a, b in pairwise(sorted(steps)))
    return gaps.most_common(1)[0][0] if gaps else 1


_HITS = (Kind.APPLYING, Kind.APPLIED)


def _with_unfinished(events: Sequence[Event], seen: Executions) -> tuple[Sequence[Event], Executions]:
    """The same events and steps, counted alike on all ranks: a step that was broken off counts also on ranks that did
    not finish it. `events`: in order of time."""
    later = [found for attempt in sorted(seen.attempts) for found in _broken_off(events, seen.of_attempt(attempt))]
    for back in later:
        who, since_s = (back.attempt, back.rank), back.mono_s
        events = [
            replace(event, step=event.step + 1)
            if (event.attempt, event.rank) == who and event.mono_s >= since_s and event.step is not None
            else event
            for event in events
        ]
        own = (seen.attempt == back.attempt) & (seen.rank == back.rank) & (seen.mono_s >= since_s)
        seen = seen.replaced({
            int(place): replace(seen[int(place)], local_step=seen[int(place)].local_step + 1)
            for place in own.nonzero()[0]
        })  # fmt: skip
    return events, seen


def _broken_off(events: Sequence[Event], own: Executions) -> Iterator[Event]:
    """The states to which ranks of an attempt went back after a fault. From there on, these ranks count one step less
    than other ranks. `own`: the steps of the attempt."""
    (attempt,) = own.attempts
    mine = [
        event for event in events if event.attempt == attempt and event.kind in (*_HITS, Kind.BEGUN, Kind.SAVE_BEGIN)
    ]
    raised = dict.fromkeys(sorted(own.ranks), 0)  # by how much the count of each rank was raised
    found = list[Event]()
    for hit in (event for event in mine if event.kind in _HITS):
        states = [_went_back_to(mine, hit.mono_s, rank) for rank in raised]
        counts = {state.rank: (state.step or 0) + raised[state.rank or 0] for state in states if state}
        behind = [state for state in states if state and counts[state.rank] == max(counts.values()) - 1]
        if len(counts) < len(raised) or len({*counts.values()}) != 2 or len(behind) == len(states):
            continue
        if min(counts.values()) < max(counts.values()) - 1 or hit.rank not in (None, *(state.rank for state in behind)):
            continue
        if all(state not in found and not _made_a_step(own, hit.mono_s, state) for state in behind):
            found += behind
            raised.update({state.rank or 0: raised[state.rank or 0] + 1 for state in behind})
    yield from found


def _went_back_to(events: Sequence[Event], hit_s: float, rank: int) -> Event | None:
    """The first state with which a rank began a step after a fault. None if the rank saved before that: then it is the
    state after the save."""
    later = (event for event in events if event.rank == rank and event.mono_s > hit_s and event.kind not in _HITS)
    first = next(later, None)
    return first if first and first.kind is Kind.BEGUN and first.step else None


def _made_a_step(own: Executions, hit_s: float, state: Event) -> bool:
    """Whether the rank finished a step between the fault and the state."""
    return bool(((own.rank == state.rank) & (own.mono_s > hit_s) & (own.mono_s < state.mono_s)).any())
