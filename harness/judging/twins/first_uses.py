"""Finds the step in which each sample was consumed first, by the sample's index."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.record.history import StepTable
from torchaos.harness.record.steps.samples import as_indices

Array = npt.NDArray[Any]


def indices_of(steps: StepTable, step: int) -> list[int]:
    """The indices of the samples that all ranks consumed in a step."""
    return [index for execution in steps[step].values() for index in execution.indices]


def came_earlier(steps: StepTable, step: int) -> bool:
    """Whether the first sample of a step was also consumed in an earlier step. A step that only repeats samples always
    begins with such a sample."""
    own = indices_of(steps, step)[:1]
    wanted = as_indices([own])[0]
    return any((indices[at < step] == wanted).any() for at, indices in (steps.executions.indices() if own else ()))


class FirstUses:
    """The first use of each sample, from all indices of the history."""

    def __init__(self, steps: StepTable) -> None:
        self._steps = steps
        every = [np.unique(indices) for _, indices in steps.executions.indices()]
        self._known = np.unique(np.concatenate([np.zeros(0, np.int64), *every]))
        self._first = np.full(len(self._known), np.iinfo(np.int64).max)
        for at, indices in steps.executions.indices():
            np.minimum.at(self._first, self._places(indices), at[:, None])

    def of(self, index: int) -> int:
        """The step that consumed this sample first."""
        return int(self._first[self._places(as_indices([[index]]))[0, 0]])

    def after(self, step: int) -> int:
        """The number of samples that were consumed first after a step."""
        return int((self._first > step).sum())

    def repeated(self) -> set[int]:
        """The steps that consumed only samples of earlier steps."""
        had, new = set[int](), set[int]()
        for at, indices in self._steps.executions.indices():
            is_new = (self._first[self._places(indices)] >= at[:, None]).any(1)
            had |= set(at.tolist())
            new |= set(at[is_new].tolist())
        return had - new

    def _places(self, indices: Array) -> Array:
        return np.searchsorted(self._known, indices)
