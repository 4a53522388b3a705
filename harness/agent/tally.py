"""What was seen of the iteration that is under way, kept by segment until the counter says which iteration it is of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .digests import Batch


@dataclass(frozen=True)
class Shown:
    """What the training state was, in a few bytes: see state.py."""

    parameters: str  # a check sum
    moments: str  # a check sum of what the optimizers keep of the parameters
    sketch: list[float]  # of the parameters


@dataclass
class Segment:
    """From the first backward to the end of the optimizer step that used it."""

    losses: list[float | None] = field(default_factory=list)
    pending: list[tuple[int, Any]] = field(default_factory=list)  # (place in losses, copy that is under way)
    batches: list[Batch] = field(default_factory=list)
    lr: list[float | None] = field(default_factory=list)
    opt_step: int | None = None
    sched_step: int | None = None
    skipped: bool | None = False  # None: only the GPU knows
    after: Shown | None = None  # the training state at its end
    before: Shown | None = None  # before it, in the first segment of a process and after a load
    norm: float | None = None  # of the gradient, at the end of the last backward


class Tally:
    def __init__(self) -> None:
        self.now = Segment()
        self._done: list[Segment] = []

    def seal(self) -> None:
        """The segment under way is over."""
        self._done.append(self.now)
        self.now = Segment()

    def take(self, with_last: bool) -> Segment:
        """The sealed segments as one, in order; `with_last` False: the last of them is of the next iteration."""
        count = len(self._done) if with_last else len(self._done) - 1
        taken, self._done = self._done[:count], self._done[count:]
        if len(taken) == 1:
            return taken[0]
        whole = Segment()
        for one in taken:
            whole.pending += [(place + len(whole.losses), copy) for place, copy in one.pending]
            whole.losses += one.losses
            whole.batches += [batch for batch in one.batches if batch not in whole.batches]
            whole.lr += one.lr
            whole.after, whole.before = one.after, whole.before or one.before
            whole.norm = whole.norm if one.norm is None else one.norm  # several optimizers may step after one backward
            whole.opt_step = one.opt_step if whole.opt_step is None else whole.opt_step
            whole.sched_step = one.sched_step if whole.sched_step is None else whole.sched_step
            # Only an iteration all of whose steps were skipped has left the parameters alone.
        whole.skipped = None if any(one.skipped is None for one in taken) else bool(taken) and all(
            one.skipped for one in taken
        )  # fmt: skip
        return whole
