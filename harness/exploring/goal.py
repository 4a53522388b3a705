"""Decides when a resume has shown enough, and when it hangs. Both classes look at the events of a live run. Each call
gets the events of the call before, and perhaps more."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import base_of

_LIFE = frozenset({  # events that show that a rank is alive, or is started again
    Kind.STEP, Kind.LOSS, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN, Kind.LOAD_END, Kind.AGENT_STARTED,
    Kind.RANK_UP, Kind.GROUP_JOINED, Kind.JOB_STARTED,
})  # fmt: skip


class Goal:
    """Reached when every rank has trained some steps beyond the death, in the newest attempt."""

    def __init__(self, died_at: int, beyond: int, ranks: int) -> None:
        """`died_at`: the highest global step before the death; `beyond`: how many more steps are wanted."""
        self._due, self._least, self._ranks = died_at + beyond, beyond, ranks
        self._seen = 0  # events that were seen
        self._newest = 0  # attempt
        self._done: dict[int, int] = {}  # local steps of the newest attempt by rank
        self._looked = 0  # the fewest steps of a rank at the last look at the history
        self._open = 0  # saves that have begun and have not ended

    def is_reached(self, events: Sequence[Event]) -> bool:
        """Whether the goal is reached, and no rank is in the middle of a save: an interrupted save would look torn."""
        if len(events) == self._seen:
            return False
        for event in events[self._seen :]:
            self._note(event)
        self._seen = len(events)
        slowest = min(self._done.values()) if len(self._done) >= self._ranks else 0
        if slowest < self._least or slowest <= self._looked or self._open > 0:
            return False
        self._looked = slowest
        base, _witnesses = base_of(list(events), self._newest)
        return base is not None and base + slowest >= self._due

    def _note(self, event: Event) -> None:
        if event.attempt is None or event.attempt < self._newest:
            return
        if event.attempt > self._newest:
            self._newest, self._done, self._looked, self._open = event.attempt, {}, 0, 0
        if event.attempt and event.rank is not None and event.kind is Kind.STEP and event.step is not None:
            self._done[event.rank] = max(self._done.get(event.rank, 0), event.step)
        self._open += (event.kind is Kind.SAVE_BEGIN) - (event.kind is Kind.SAVE_END)


class Patience:
    """The time in which a resume must show a sign of life; otherwise it counts as hung."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s, self._since_s, self._seen = limit_s, now_s, 0

    def is_over(self, events: Sequence[Event], now_s: float) -> bool:
        if any(event.kind in _LIFE for event in events[self._seen :]):
            self._since_s = now_s
        self._seen = len(events)
        return now_s - self._since_s > self.limit_s
