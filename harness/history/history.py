"""From the events of a run to the history that counts. The only place where global steps are made. Pure.

Within an attempt the agent counts steps from 1. Attempt k has a base, the global steps done before its first one (see
witnesses.py); a step of attempt k counts unless a later attempt that made steps resumed at or before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.history import attempts, checkpoints, executions
from torchaos.harness.history.attempts import Attempt
from torchaos.harness.history.checkpoints import Load, Save
from torchaos.harness.history.executions import Execution
from torchaos.harness.history.witnesses import Scene, Witness, decide, hear, log_lead

Lines = list[tuple[float, int]]  # (mono_s, step) of log lines


@dataclass(frozen=True)
class History:
    attempts: tuple[Attempt, ...]
    executions: tuple[Execution, ...]  # in order of attempt, then of time
    saves: tuple[Save, ...]
    loads: tuple[Load, ...]
    source: Literal["agent", "log", "none"]  # who told of the steps

    @classmethod
    def of(cls, events: Sequence[Event], twin: History | None = None) -> History:
        """`events` in any order; a twin adds to what samples, losses and counters are aligned with."""
        ordered = sorted(events, key=lambda event: (event.mono_s, event.source, event.seq))
        found = attempts.read(ordered)
        loads, saves = checkpoints.read_loads(ordered), checkpoints.read_saves(ordered)
        seen = executions.from_agent(ordered)
        if seen:
            return _Placing(found, seen, saves, loads, _lines(ordered), twin).history()
        logged = executions.from_log(ordered, [(one.number, one.started_s) for one in found])
        if logged and not found:
            found = [Attempt(0, 0, {}, logged[0].mono_s, None, 0)]
        return cls(_from_log(found, logged), tuple(logged), (), (), "log" if logged else "none")

    def attempt(self, number: int) -> Attempt | None:
        return next((one for one in self.attempts if one.number == number), None)

    def attempt_at(self, mono_s: float) -> Attempt | None:
        """The last attempt that had started by then."""
        return next((one for one in reversed(self.attempts) if one.started_s <= mono_s), None)

    @property
    def unplaced(self) -> tuple[int, ...]:
        """Attempts that made steps of which nobody can say which global steps they were."""
        return tuple(sorted({one.attempt for one in self.executions if one.global_step is None}))

    def counting(self) -> Mapping[tuple[int, int], Execution]:
        """The history that counts: by (global step, rank), in order of step."""
        return self._counting

    @cached_property
    def _counting(self) -> dict[tuple[int, int], Execution]:
        found: dict[tuple[int, int], Execution] = {}
        for attempt in self.attempts:
            own = [one for one in self.executions if one.attempt == attempt.number and one.global_step is not None]
            if own:
                resumed = min(one.global_step or 0 for one in own) - 1
                kept = resumed if attempt.base is None else attempt.base
                found = {key: one for key, one in found.items() if key[0] <= kept}
                found.update({(one.global_step or 0, one.rank): one for one in own})
        return dict(sorted(found.items()))

    def redone(self) -> list[tuple[Execution, Execution]]:
        """Each step that a rank executed again: (the first execution, the execution again), in order of step."""
        placed = [one for one in self.executions if one.global_step is not None]
        first: dict[tuple[int, int], Execution] = {}
        for one in placed:
            first.setdefault((one.global_step or 0, one.rank), one)
        pairs = [(first[one.global_step or 0, one.rank], one) for one in placed]
        again = [(old, new) for old, new in pairs if old is not new]
        return sorted(again, key=lambda pair: (pair[1].global_step or 0, pair[1].rank, pair[1].attempt))

    def highest_step(self, before_s: float | None = None, attempt: int | None = None) -> int | None:
        """The highest global step that any rank finished: by then, and in that attempt, where these are given."""
        return max(
            (
                one.global_step
                for one in self.executions
                if one.global_step is not None
                and (before_s is None or one.mono_s <= before_s)
                and (attempt is None or one.attempt == attempt)
            ),
            default=None,
        )

    def steps_done(self, rank: int | None, attempt: int | None, mono_s: float) -> int | None:
        """How many global steps a rank (None: the foremost) had done by then; None when that can't be established."""
        life = self.attempt_at(mono_s) if attempt is None else self.attempt(attempt)
        if life is None or life.base is None:
            return None
        own = [one for one in self.executions if one.attempt == life.number and rank in (None, one.rank)]
        return max((one.global_step or 0 for one in own if one.mono_s <= mono_s), default=life.base)

    @property
    def last_step(self) -> int | None:
        """The last global step of the history that counts."""
        return max((step for step, _rank in self._counting), default=None)

    def by_step(self) -> dict[int, dict[int, Execution]]:
        """The history that counts: by global step, then by rank."""
        found: dict[int, dict[int, Execution]] = defaultdict(dict)
        for (step, rank), one in self._counting.items():
            found[step][rank] = one
        return dict(found)


def base_of(events: Sequence[Event], attempt: int, twin: History | None = None) -> tuple[int | None, list[Witness]]:
    """How many global steps were done before that attempt's first one, as far as these events tell, and who says so."""
    found = History.of(events, twin).attempt(attempt)
    return (found.base, list(found.witnesses)) if found else (None, [])


class _Placing:
    """Goes through the attempts in order; what is placed already helps to place the next one."""

    def __init__(
        self, found: list[Attempt], seen: list[Execution], saves: list[Save], loads: list[Load], lines: Lines,
        twin: History | None,
    ) -> None:  # fmt: skip
        self._found, self._loads, self._lines = found, loads, lines
        self._twin = list(twin.counting().values()) if twin else []
        self._seen: dict[int, list[Execution]] = defaultdict(list)
        self._saves: dict[int, list[Save]] = defaultdict(list)
        for one in seen:
            self._seen[one.attempt].append(one)
        for save in saves:
            self._saves[save.attempt].append(save)
        self._placed: list[Execution] = []
        self._saved: list[Save] = []
        self._log_offset = 0

    def history(self) -> History:
        placed = tuple(self._place(attempt) for attempt in self._found)
        return History(placed, tuple(self._placed), tuple(self._saved), tuple(self._loads), "agent")

    def _place(self, attempt: Attempt) -> Attempt:
        own = self._seen[attempt.number]
        loads = self._before_first_step(attempt.number, own)
        known = [*self._twin, *(one for one in self._placed if one.global_step is not None)]
        lines = self._lines_of(attempt)
        first = attempt is self._found[0]
        witnesses = hear(Scene(first, own, loads, lines, self._saved, known, self._log_offset))
        base, conflicts = decide(witnesses)
        if base is not None:
            own = [executions.with_global_step(one, base + one.local_step) for one in own]
            if lines:
                self._calibrate(lines, own)
        self._placed += own
        for save in self._saves[attempt.number]:
            self._saved.append(save if base is None else replace(save, global_step=base + save.local_step))
        steps = [one.global_step for one in own if one.global_step is not None]
        loaded = next((load.path for load in reversed(checkpoints.whole_loads(loads))), None)
        return replace(
            attempt, base=base, witnesses=tuple(witnesses), conflicts=conflicts, loaded=loaded,
            first_step=min(steps, default=None), last_step=max(steps, default=None),
        )  # fmt: skip

    def _before_first_step(self, attempt: int, own: list[Execution]) -> list[Load]:
        first: dict[int, float] = {}
        for one in own:
            first[one.rank] = min(first.get(one.rank, one.mono_s), one.mono_s)
        loads = [load for load in self._loads if load.attempt == attempt]
        return [load for load in loads if load.mono_s <= first.get(load.rank, load.mono_s)]

    def _lines_of(self, attempt: Attempt) -> Lines:
        later = [one.started_s for one in self._found if one.number > attempt.number]
        return [line for line in self._lines if attempt.started_s <= line[0] < min(later, default=float("inf"))]

    def _calibrate(self, lines: Lines, own: list[Execution]) -> None:
        lead = log_lead(lines, [(one.mono_s, one.global_step) for one in own if one.global_step is not None])
        if lead is not None and abs(lead) <= 1:
            self._log_offset = lead


def _lines(events: Sequence[Event]) -> Lines:
    lines = [(event.mono_s, event.data.get("step")) for event in events if event.kind is Kind.LOG_STEP]
    return [(at, step) for at, step in lines if isinstance(step, int)]


def _from_log(found: list[Attempt], logged: list[Execution]) -> tuple[Attempt, ...]:
    """The base of an attempt that only a log tells of is known when every step has a line of its own."""
    interval = executions.log_interval(logged)
    placed = []
    for attempt in found:
        steps = [one.local_step for one in logged if one.attempt == attempt.number]
        if not steps:
            placed.append(attempt)
            continue
        low = min(steps)
        fits = tuple(range(max(low - interval, 0), low))
        witness = Witness("the job's log", fits[0] if len(fits) == 1 else None, f"its first line is of step {low}",
                          () if len(fits) == 1 else fits)  # fmt: skip
        placed.append(replace(attempt, base=witness.value, witnesses=(witness,), first_step=low, last_step=max(steps)))
    return tuple(placed)
