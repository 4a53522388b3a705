"""How far a job goes back, or on, when it loads a checkpoint between two steps. Standard library alone."""

from __future__ import annotations

from typing import Any

from .rates import optimizer_step


class GoingBack:
    """What the optimizers' own counters tell, and whether a checkpoint was loaded, since the last step was over."""

    def __init__(self) -> None:
        self._place = 0  # steps over
        self._loaded = False
        self._before: dict[int, int | None] = {}  # counters by optimizer
        self._by: dict[int, int | None] = {}  # how much less they count now

    def loaded(self, place: int) -> None:
        self._come_to(place)
        self._loaded = True

    def puts_back(self, place: int, optimizer: Any) -> None:
        """An optimizer is about to load a state."""
        self._come_to(place)
        self._before.setdefault(id(optimizer), optimizer_step(optimizer))

    def was_put_back(self, optimizer: Any) -> None:
        before = self._before.get(id(optimizer))
        self._by[id(optimizer)] = None if before is None else before - (optimizer_step(optimizer) or 0)

    def happened(self, place: int) -> bool:
        """Whether the job has loaded both a checkpoint and the state of an optimizer since that step was over."""
        return place == self._place and self._loaded and bool(self._by)

    @property
    def by(self) -> int | None:
        """So many steps are to be done again; less than 0: it skipped some. None where the counters don't tell."""
        found = set(self._by.values())
        return found.pop() if len(found) == 1 else None

    def _come_to(self, place: int) -> None:
        if place != self._place:
            self._place, self._loaded, self._before, self._by = place, False, {}, {}
