"""Collects the observations of the current iteration, by segment, until the counter knows which segments belong to
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .digests import Batch


@dataclass(frozen=True)
class Shown:
    """The training state at one time, in a few bytes; see state.py."""

    parameters: str  # a check sum
    moments: str  # a check sum of the optimizers' moments
    sketch: list[float]  # of the parameters


@dataclass(slots=True)
class Segment:
    """The part of a step from its first backward to the end of the optimizer step that uses it."""

    losses: list[float | None] = field(default_factory=list)
    pending: list[tuple[int, Any]] = field(default_factory=list)  # (index in losses, copy in progress)
    batches: list[Batch] = field(default_factory=list)
    lr: list[float | None] = field(default_factory=list)
    opt_step: int | None = None
    sched_step: int | None = None
    skipped: bool | None = False  # None: only the GPU knows
    after: Shown | None = None  # the training state at its end
    before: Shown | None = None  # the state before it, in the first segment of a process and after a load
    norm: float | None = None  # of the gradient, at the end of the last backward


class Tally:
    def __init__(self) -> None:
        self.now = Segment()
        self._done: list[Segment] = []

    def seal(self) -> None:
        """Ends the current segment and begins a new one."""
        self._done.append(self.now)
        self.now = Segment()

    def take(self, with_last: bool) -> Segment:
        """The finished segments of an iteration, joined. `with_last` False: without the last segment, which belongs to
        the next iteration."""
        if with_last and len(self._done) == 1:
            return self._done.pop()
        count = len(self._done) if with_last else len(self._done) - 1
        taken, self._done = self._done[:count], self._done[count:]
        if len(taken) == 1:
            return taken[0]
        whole = Segment()
        for segment in taken:
            whole.pending += [(place + len(whole.losses), copy) for place, copy in segment.pending]
            whole.losses += segment.losses
            whole.batches += [batch for batch in segment.batches if batch not in whole.batches]
            whole.lr += segment.lr
            whole.after, whole.before = segment.after, whole.before or segment.before
            if segment.norm is not None:  # several optimizers may step after one backward
                whole.norm = segment.norm
            whole.opt_step = segment.opt_step if whole.opt_step is None else whole.opt_step
            whole.sched_step = segment.sched_step if whole.sched_step is None else whole.sched_step
            # An iteration is skipped only if all its optimizer steps were skipped. Otherwise the parameters have
            # changed.
        whole.skipped = None if any(segment.skipped is None for segment in taken) else bool(taken) and all(
            segment.skipped for segment in taken
        )  # fmt: skip
        return whole
