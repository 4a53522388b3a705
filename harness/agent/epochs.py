"""Finds out when a further epoch begins: with the first backward after a loader of the training had no more batches.
By then all that the loop does at the end of an epoch, such as a validation or a save, is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .wire import Phase

if TYPE_CHECKING:
    from .agent import Agent

_BEGUN = "_torchaos_begun"


class Epochs:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._after: int | None = None  # a further epoch begins when so many steps are over
        careful = agent.careful("samples")
        self.receives, self.exhausted = careful(self._receives), careful(self._exhausted)

    def _receives(self, iterator: Any) -> None:
        """Must be called when the loop has got a batch from this iterator."""
        iterator.__dict__.setdefault(_BEGUN, self._agent.steps_over)

    def resets(self, iterator: Any) -> None:
        """Must be called when this iterator begins again."""
        iterator.__dict__.pop(_BEGUN, None)

    def _exhausted(self, iterator: Any, ahead: int) -> None:
        """Must be called when this iterator has no more batches. `ahead`: how many of its batches the loop has not got
        yet. Without a step between its first batch and its end, the iterator is none of the training."""
        begun = iterator.__dict__.pop(_BEGUN, None)
        if begun is not None and self._agent.steps_over > begun:
            self._after = self._agent.steps_over + ahead

    def backward(self) -> None:
        """Must be called when a backward begins. An order may fire here."""
        if self._after is not None and self._agent.steps_over >= self._after:
            self._after = None
            self._agent.orders.enter(Phase.NEW_EPOCH)
