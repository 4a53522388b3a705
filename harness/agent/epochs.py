"""Finds out when a further epoch begins: with the first backward after a loader of the training had no more batches.
By then all that the loop does at the end of an epoch, such as a validation or a save, is over. Some loops, such as
Lightning's, count the batches, and never ask a loader for more than it has. Then an epoch begins with the first
backward after another iterator has begun."""

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
        self._last: int | None = None  # an iterator of the training gave its last batch: the number of its step
        careful = agent.careful("samples")
        self.receives, self.exhausted = careful(self._receives), careful(self._exhausted)

    def _receives(self, iterator: Any) -> None:
        """Must be called when the loop has got a batch from this iterator."""
        begins = _BEGUN not in iterator.__dict__
        begun = iterator.__dict__.setdefault(_BEGUN, self._agent.steps_over)
        if begins and self._last is not None:
            self._after, self._last = self._last, None
        if self._agent.steps_over > begun and _is_last(iterator):
            self._last = self._agent.steps_over + 1

    def resets(self, iterator: Any) -> None:
        """Must be called when this iterator begins again."""
        iterator.__dict__.pop(_BEGUN, None)

    def _exhausted(self, iterator: Any, ahead: int) -> None:
        """Must be called when this iterator has no more batches. `ahead`: how many of its batches the loop has not got
        yet. Without a step between its first batch and its end, the iterator is none of the training."""
        begun = iterator.__dict__.pop(_BEGUN, None)
        if begun is not None and self._agent.steps_over > begun:
            self._last = None
            self._after = self._agent.steps_over + ahead

    def backward(self) -> None:
        """Must be called when a backward begins. An order may fire here."""
        if self._after is not None and self._agent.steps_over >= self._after:
            self._after = None
            self._agent.orders.enter(Phase.NEW_EPOCH)


def _is_last(iterator: Any) -> bool:
    """Whether the batch that the iterator gave last is its last one. False if its length is not known."""
    try:
        return bool(iterator._num_yielded >= len(iterator))
    except (AttributeError, TypeError, NotImplementedError):
        return False
