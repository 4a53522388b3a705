"""The progress of each rank. A function gives the base of each attempt, because only the history makes global steps."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.saved_steps import main_of

_KEPT = 8  # losses of a rank, for a rank that is ahead of the others
_ASK_AT = (1, 3)  # ask for the base of an attempt after these steps: one step may be too few to align samples


@dataclass
class RankView:
    rank: int
    attempt: int
    local_step: int
    losses: dict[int, float] = field(default_factory=dict)  # of the newest steps, by local step

    @property
    def loss(self) -> float | None:
        return next(reversed(self.losses.values()), None)


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
        before = self.ranks.get(event.rank)
        same = before is not None and before.attempt == (event.attempt or 0)
        view = RankView(event.rank, event.attempt or 0, event.step, before.losses if before and same else {})
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
        parts = [
            self.where(slowest),
            f"rank {slowest.rank} is {ahead} behind" if ahead > 1 else "",
            f"attempt {newest}",
            _loss(views, slowest.local_step),
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
        if losses:
            view.losses[view.local_step] = float(losses[-1]) if math.isfinite(losses[-1]) else math.nan
            while len(view.losses) > _KEPT:
                view.losses.pop(next(iter(view.losses)))


def _loss(views: Sequence[RankView], step: int) -> str:
    """The loss of the lowest rank that has losses, in the given local step or, if that is not known, in its newest
    step. Always of the same rank: the ranks have different losses."""
    view = min((view for view in views if view.losses), key=lambda view: view.rank, default=None)
    if view is None:
        return ""
    whose = f" on rank {view.rank}" if view.rank else ""
    return f"loss {view.losses.get(step, view.loss):.4g}{whose}"
