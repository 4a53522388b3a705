"""From the events of a run to the final history. This is the only place where global steps are made. Pure.

Within an attempt the agent counts steps from 1. An attempt has a base: the number of global steps before its first step
(see witnesses.py). If it loads a checkpoint between two steps, it has another base from there on (see placing.py). The
steps on one base are a segment. A step counts, unless a later segment that has steps began before this step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal, TypeVar

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import attempts, checkpoints, executions
from torchaos.harness.record.history.attempts import Attempt
from torchaos.harness.record.history.believing import LOG, RECORD, Witness
from torchaos.harness.record.history.checkpoints import Load, Save
from torchaos.harness.record.history.executions import Execution
from torchaos.harness.record.history.placing import Lines, Placing
from torchaos.harness.record.history.segments import Segment

Own = TypeVar("Own", Execution, Save)


@dataclass(frozen=True)
class History:
    attempts: tuple[Attempt, ...]
    executions: tuple[Execution, ...]  # in order of attempt, then of time
    saves: tuple[Save, ...]
    loads: tuple[Load, ...]
    source: Literal["agent", "log", "none"]  # who reported the steps
    uneven: tuple[
        int, ...
    ] = ()  # steps by rank in an attempt that ended well, where they differ: none has a global step

    @classmethod
    def of(cls, events: Sequence[Event], twin: History | None = None) -> History:
        """The history of these events, in any order. With a twin, samples, losses and counters are also aligned with
        those of the twin."""
        ordered = sorted(events, key=lambda event: (event.mono_s, event.source, event.seq))
        found = attempts.read(ordered)
        loads, saves = checkpoints.read_loads(ordered), checkpoints.read_saves(ordered)
        seen = executions.from_agent(ordered)
        if seen:
            uneven = _uneven(ordered, found, seen) or (twin.uneven if twin else ())
            placing = Placing(
                found, _by_attempt(seen), _by_attempt(saves), loads, _lines(ordered),
                list(twin.counting().values()) if twin else [], uneven,
            )  # fmt: skip
            placed = tuple(placing.place(attempt) for attempt in found)
            return cls(placed, tuple(placing.placed), tuple(placing.saved), tuple(loads), "agent", uneven)
        logged = executions.from_log(ordered, [(one.number, one.started_s) for one in found])
        if logged and not found:
            found = [Attempt(0, 0, {}, logged[0].mono_s, None, 0)]
        return cls(_from_log(found, logged), tuple(logged), (), (), "log" if logged else "none")

    def attempt(self, number: int) -> Attempt | None:
        return next((one for one in self.attempts if one.number == number), None)

    def attempt_at(self, mono_s: float) -> Attempt | None:
        """The last attempt that had started by that time. None if there is none."""
        return next((one for one in reversed(self.attempts) if one.started_s <= mono_s), None)

    @property
    def unplaced(self) -> tuple[int, ...]:
        """Attempts with steps whose global numbers are not known."""
        return tuple(sorted({one.attempt for one in self.executions if one.global_step is None}))

    def counting(self) -> Mapping[tuple[int, int], Execution]:
        """The final history: by (global step, rank), in order of steps."""
        return self._counting

    @cached_property
    def _counting(self) -> dict[tuple[int, int], Execution]:
        made: dict[tuple[int, int], list[Execution]] = defaultdict(list)
        for one in self.executions:
            if one.global_step is not None:
                made[one.attempt, one.segment].append(one)
        found: dict[tuple[int, int], Execution] = {}
        for part in self.segments:
            own = made.pop((part.number, part.after), [])
            if own or (not made and self._put_back(part)):
                resumed = part.base if part.base is not None else min(one.global_step or 0 for one in own) - 1
                found = {key: one for key, one in found.items() if key[0] <= resumed}
                found.update({(one.global_step or 0, one.rank): one for one in own})
        return dict(sorted(found.items()))

    def _put_back(self, part: Segment) -> bool:
        """Whether a segment without steps restored an earlier state, because it loaded a checkpoint of this run. False
        if it saved a checkpoint, because then it had steps that were not seen. False also if it ended successfully with
        an older checkpoint than the newest, which may have been loaded for an evaluation."""
        saved = any(save.attempt == part.number for save in self.saves)
        if saved or part.base is None or not any(one.name == RECORD for one in part.witnesses):
            return False
        attempt = self.attempt(part.number)
        ended_well = attempt is not None and set(attempt.exit_codes.values()) == {0}
        had = [one.global_step or 0 for one in self.saves if one.ok and one.attempt < part.number]
        return not ended_well or part.base >= max(had, default=0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all attempts, in order."""
        return tuple(
            part for one in self.attempts for part in one.segments or (Segment(one.number, 0, one.started_s, one.base),)
        )

    def put_back(self, attempt: int, since_s: float, until_s: float = math.inf) -> list[Segment]:
        """The segments that an attempt began in that time because it loaded a checkpoint again."""
        return [
            one for one in self.segments if one.number == attempt and one.after and since_s < one.started_s <= until_s
        ]

    def redone(self) -> list[tuple[Execution, Execution]]:
        """Each step that a rank executed again, as (first execution, repeated execution), in order of steps."""
        placed = [one for one in self.executions if one.global_step is not None]
        first: dict[tuple[int, int], Execution] = {}
        for one in placed:
            first.setdefault((one.global_step or 0, one.rank), one)
        pairs = [(first[one.global_step or 0, one.rank], one) for one in placed]
        again = [(old, new) for old, new in pairs if old is not new]
        return sorted(again, key=lambda pair: (pair[1].global_step or 0, pair[1].rank, pair[1].attempt))

    def highest_step(self, before_s: float = inf) -> int | None:
        """The highest global step that any rank completed before `before_s` (seconds of CLOCK_MONOTONIC)."""
        steps = (one.global_step for one in self.executions if one.mono_s <= before_s)
        return max((step for step in steps if step is not None), default=None)

    def steps_done(self, rank: int | None, attempt: int | None, mono_s: float) -> int | None:
        """How many global steps a rank (None: the rank that had completed the most) had completed by that time. None if
        not known."""
        life = self.attempt_at(mono_s) if attempt is None else self.attempt(attempt)
        if life is None or life.base is None:
            return None
        part = [one for one in self.segments if one.number == life.number and self._seen_from_s(one) <= mono_s][-1:]
        base, after = (part[0].base, part[0].after) if part else (life.base, 0)
        own = [
            one for one in self.executions
            if one.attempt == life.number and one.segment == after and rank in (None, one.rank)
        ]  # fmt: skip
        return max((one.global_step or 0 for one in own if one.mono_s <= mono_s), default=base)

    def _seen_from_s(self, part: Segment) -> float:
        """The time from which a segment is visible. No event shows that a job returns to a state in memory; only the
        end of its next step shows it. Events before the end of that step, such as the fault that made the job go back,
        belong to the steps before."""
        if not part.in_memory:
            return part.started_s
        own = (one.mono_s for one in self.executions if (one.attempt, one.segment) == (part.number, part.after))
        return min(own, default=part.started_s)

    @property
    def last_step(self) -> int | None:
        """The last global step of the final history."""
        return max((step for step, _rank in self._counting), default=None)

    def by_step(self) -> dict[int, dict[int, Execution]]:
        """The final history: by global step, then by rank."""
        found: dict[int, dict[int, Execution]] = defaultdict(dict)
        for (step, rank), one in self._counting.items():
            found[step][rank] = one
        return dict(found)


def base_of(events: Sequence[Event], attempt: int) -> tuple[int | None, list[Witness]]:
    """The number that must be added to an attempt's local steps, and its witnesses. It is the number of global steps
    before the attempt's first step, without steps that only warmed it up or that it has undone since."""
    found = History.of(events).attempt(attempt)
    if found is None or not found.segments:
        return (found.base, list(found.witnesses)) if found else (None, [])
    newest = found.segments[-1]
    return newest.global_step(0), list(newest.witnesses)


def _uneven(ordered: Sequence[Event], found: Sequence[Attempt], seen: Sequence[Execution]) -> tuple[int, ...]:
    """How many steps each rank made, in an attempt that ended successfully, if these numbers differ. Otherwise
    empty."""
    blind = {event.attempt for event in ordered if event.kind is Kind.AGENT_FAILED}
    for attempt in found:
        if attempt.number in blind or set(attempt.exit_codes.values()) != {0}:
            continue
        made: dict[int, int] = {}
        for one in seen:
            if one.attempt == attempt.number:
                made[one.rank] = max(made.get(one.rank, 0), one.local_step)
        if len(set(made.values())) > 1:
            return tuple(made[rank] for rank in sorted(made))
    return ()


def _by_attempt(found: Iterable[Own]) -> dict[int, list[Own]]:
    sorted_out: dict[int, list[Own]] = defaultdict(list)
    for one in found:
        sorted_out[one.attempt].append(one)
    return sorted_out


def _lines(events: Sequence[Event]) -> Lines:
    lines = [(event.mono_s, event.data.get("step")) for event in events if event.kind is Kind.LOG_STEP]
    return [(at, step) for at, step in lines if isinstance(step, int)]


def _from_log(found: list[Attempt], logged: list[Execution]) -> tuple[Attempt, ...]:
    """The attempts of a job of which only the log is known, with their bases. A base is known if every step has its own
    log line."""
    interval = executions.log_interval(logged)
    placed = []
    for attempt in found:
        steps = [one.local_step for one in logged if one.attempt == attempt.number]
        if not steps:
            placed.append(attempt)
            continue
        low = min(steps)
        fits = tuple(range(max(low - interval, 0), low))
        witness = Witness(LOG, fits[0] if len(fits) == 1 else None, f"its first line is of step {low}",
                          () if len(fits) == 1 else fits)  # fmt: skip
        placed.append(replace(attempt, base=witness.value, witnesses=(witness,), first_step=low, last_step=max(steps)))
    return tuple(placed)
