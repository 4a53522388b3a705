"""The progress of each rank. A function gives the base of each attempt, because only the history makes global steps."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.saved_steps import main_of

_ASK_AT = (1, 3)  # ask for the base of an attempt after these steps: one step may be too few to align samples


@dataclass
class RankView:
    rank: int
    attempt: int
    local_step: int
    loss: float | None = None


class Progress:
    def __init__(self, base_of: Callable[[int], int | None]) -> None:
        self._base_of = base_of
        self._bases: dict[int, int | None] = {}
        self._asked: set[tuple[int, int]] = set()
        self.ranks: dict[int, RankView] = {}
        self.highest = 0
        self.checkpoint = ""  # the last checkpoint that was saved
        self._saved: list[str] = []  # its files
        self._saved_at: tuple[int | None, int | None] = (None, None)  # their attempt and step

    def note(self, event: Event) -> bool:
        """Records the event. Returns whether it shows progress of a rank."""
        if event.kind is Kind.SAVE_END and event.data["ok"]:
            self._note_save(event)
        if event.kind is Kind.RENAMED and posixpath.basename(str(event.data["path"])) == self.checkpoint:
            self.checkpoint = posixpath.basename(str(event.data["to"]).rstrip("/"))
        if event.kind is Kind.LOSS and event.rank in self.ranks:
            self._note_loss(self.ranks[event.rank], event)
        if event.kind is not Kind.STEP or event.rank is None or event.step is None:
            return False
        view = RankView(event.rank, event.attempt or 0, event.step, getattr(self.ranks.get(event.rank), "loss", None))
        self.ranks[event.rank] = view
        self._note_loss(view, event)
        self._ask(view)
        self.highest = max(self.highest, self.step_of(view) or 0)
        return True

    def _note_save(self, event: Event) -> None:
        self._saved = [*(self._saved if (event.attempt, event.step) == self._saved_at else []), str(event.data["path"])]
        self._saved_at = event.attempt, event.step
        self.checkpoint = posixpath.basename(main_of(self._saved).rstrip("/"))

    def step_of(self, view: RankView) -> int | None:
        """The global step that a rank has finished. None if it is not known."""
        base = self._bases.get(view.attempt)
        return None if base is None else base + view.local_step

    def where(self, view: RankView) -> str:
        step = self.step_of(view)
        return f"step {step}" if step is not None else f"step {view.local_step} of this attempt"

    def in_words(self) -> str:
        """The progress of all ranks of the newest attempt, on one line."""
        newest = max((view.attempt for view in self.ranks.values()), default=0)
        views = [view for view in self.ranks.values() if view.attempt == newest]
        slowest = min(views, key=lambda view: view.local_step)
        ahead = max(view.local_step for view in views) - slowest.local_step
        loss = next((view.loss for view in (slowest, *views) if view.loss is not None), None)
        parts = [
            self.where(slowest),
            f"rank {slowest.rank} is {ahead} behind" if ahead > 1 else "",
            f"attempt {newest}",
            f"loss {loss:.4g}" if loss is not None else "",
            f"last checkpoint {self.checkpoint}" if self.checkpoint else "",
        ]
        return ", ".join(part for part in parts if part)

    def _ask(self, view: RankView) -> None:
        at = (view.attempt, view.local_step)
        if view.local_step in _ASK_AT and self._bases.get(view.attempt) is None and at not in self._asked:
            self._asked.add(at)
            self._bases[view.attempt] = self._base_of(view.attempt)

    def _note_loss(self, view: RankView, event: Event) -> None:
        losses = [loss for loss in event.data["losses"] or () if isinstance(loss, (int, float))]
        if losses and math.isfinite(losses[-1]):
            view.loss = float(losses[-1])
        elif losses:
            view.loss = math.nan
