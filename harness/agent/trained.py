"""Finds the batches that a segment was trained on: batches whose tensors went through the model before a backward."""

from __future__ import annotations

from typing import Any

from . import digests
from .digests import Batch
from .ring import Ring


class Trained:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._through_model = False  # a wrapped model has been seen in training
        self._forwards: list[Batch | None] = []  # since the last backward; None: an unknown batch
        self._committed: list[Batch | None] = []
        self._handed_out = 0  # batches that the loop had got at the last backward
        self.wrapper_is_idle = False  # a backward came before any call of a wrapped model

    def forward(self, inputs: Any) -> None:
        """Must be called when a wrapped model gets these inputs in training."""
        self._through_model, self.wrapper_is_idle = True, False
        args, kwargs = inputs
        if (owner := self._ring.owner((*args, *kwargs.values()))) is not None:
            self._forwards.append(owner)
            return
        views = digests.look(inputs)
        batch = self._ring.match(views) if views else None
        if batch is None and views and not (self._ring.has_fresh() or self._ring.is_blind):
            batch = digests.digest(views)  # there is no loader, or no loader feeds the model
        self._forwards.append(batch)

    def backward(self) -> None:
        self._committed += self._forwards if self._through_model else [None]
        self._forwards = []
        self.wrapper_is_idle = not self._through_model
        self._handed_out = self._ring.handed_out

    def drop(self) -> None:
        """Forgets the batches since the last segment, because their gradients were thrown away."""
        self._committed = []
        self._ring.pass_over(self._handed_out)

    def put_back(self) -> None:
        """Must be called when the job loads an earlier state. The batches since the last segment will not be trained
        on."""
        if self._forwards or self._committed:
            for batch in self._forwards:
                if batch is not None:
                    self._ring.use(batch)
            self._forwards = []
            self.drop()

    def take(self) -> list[Batch]:
        """The batches of the segment that has ended, each once."""
        if len(self._committed) == 1 and (only := self._committed[0]) is not None:  # the same as below, but quicker
            self._committed = []
            self._ring.use(only)
            return [only]
        known = list(dict.fromkeys(batch for batch in self._committed if batch is not None))
        unknown = self._committed.count(None)
        self._committed = []
        batches = known + [batch for batch in (self._ring.newest(unknown) if unknown else []) if batch not in known]
        for batch in batches:
            self._ring.use(batch)
        return batches
