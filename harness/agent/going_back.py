"""Finds out how many steps a job goes back, or skips, when it loads a checkpoint between two steps. Standard library
only."""

from __future__ import annotations

from typing import Any

from .rates import optimizer_step


class GoingBack:
    """Compares the optimizers' own step counters before and after a load. The load comes after the last step."""

    def __init__(self) -> None:
        self._place = 0  # iterations completed at the time of the load
        self._loaded = False
        self._before: dict[int, int | None] = {}  # counters before the load, by id of the optimizer
        self._by: dict[int, int | None] = {}  # by how much the counters went down, by id of the optimizer

    def loaded(self, place: int) -> None:
        self._come_to(place)
        self._loaded = True

    def puts_back(self, place: int, optimizer: Any) -> None:
        """Must be called when an optimizer is about to load a state."""
        self._come_to(place)
        self._before.setdefault(id(optimizer), optimizer_step(optimizer))

    def was_put_back(self, optimizer: Any) -> None:
        before = self._before.get(id(optimizer))
        self._by[id(optimizer)] = None if before is None else before - (optimizer_step(optimizer) or 0)

    def happened(self, place: int) -> bool:
        """Whether the job went on from another state after iteration `place`: it has loaded a checkpoint and an
        optimizer's state since then, or has put the state with which the process began back from memory, as after
        steps that only warm up."""
        return place == self._place and bool(self._by) and (self._loaded or self.by == place)

    @property
    def by(self) -> int | None:
        """By how many steps the job went back; a negative number: how many steps it skipped. None if the counters do
        not show it."""
        counts = set(self._by.values())
        return counts.pop() if len(counts) == 1 else None

    def _come_to(self, place: int) -> None:
        if place != self._place:
            self._place, self._loaded, self._before, self._by = place, False, {}, {}
