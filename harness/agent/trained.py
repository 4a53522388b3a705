"""Which batches a segment was trained on: those whose tensors went through the model before a backward."""

from __future__ import annotations

from typing import Any

from . import digests
from .digests import Batch
from .ring import Ring


class Trained:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._through_model = False  # a wrapped model has been seen in training
        self._forwards: list[Batch | None] = []  # not yet followed by a backward; None: only their number is known
        self._committed: list[Batch | None] = []
        self._handed_out = 0  # batches, at the last backward
        self.wrapper_is_idle = False  # a backward came, and no wrapped model had been called

    def forward(self, inputs: Any) -> None:
        """The inputs of a wrapped model, in training."""
        self._through_model, self.wrapper_is_idle = True, False
        views = digests.look(inputs)
        batch = self._ring.match(views) if views else None
        if batch is None and views and not (self._ring.has_fresh() or self._ring.is_blind):
            batch = digests.digest(views)  # there is no loader, or none that feeds the model
        self._forwards.append(batch)

    def backward(self) -> None:
        self._committed += self._forwards if self._through_model else [None]
        self._forwards = []
        self.wrapper_is_idle = not self._through_model
        self._handed_out = self._ring.handed_out

    def drop(self) -> None:
        """What came of the backwards since the last segment was thrown away."""
        self._committed = []
        self._ring.pass_over(self._handed_out)

    def put_back(self) -> None:
        """A state of before is loaded: what went through the model since the last segment will not be trained on."""
        if self._forwards or self._committed:
            for batch in self._forwards:
                if batch is not None:
                    self._ring.use(batch)
            self._forwards = []
            self.drop()

    def take(self) -> list[Batch]:
        """The batches of the segment that is over, each once."""
        known = list(dict.fromkeys(batch for batch in self._committed if batch is not None))
        unknown = self._committed.count(None)
        self._committed = []
        found = known + [batch for batch in (self._ring.newest(unknown) if unknown else []) if batch not in known]
        for batch in found:
            self._ring.use(batch)
        return found
