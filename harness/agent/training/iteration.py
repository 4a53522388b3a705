"""Collects what was seen in the current iteration: its segments (`Tally`), the seconds of its phases (`Phases`), and
whether a further epoch began (`Epochs`)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...protocol.wire import Phase
from ..batches.sample_digests import Batch

if TYPE_CHECKING:
    from ..agent import Agent


class Phases:
    """The seconds of a step that the host spent in each phase. Time in a nested phase counts for the inner phase
    only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack: list[Phase] = []
        self._since = 0.0
        self._loose: Phase | None = None
        self._seconds: defaultdict[Phase, float] = defaultdict(float)

    # `enter` and `leave` repeat the code of `_charge`, because they run in every step and a call would double their
    # cost.

    def enter(self, phase: Phase) -> None:
        now = self._clock()
        inner = self._stack[-1] if self._stack else self._loose
        if inner is not None:
            self._seconds[inner] += now - self._since
        self._since = now
        self._loose = None
        self._stack.append(phase)

    def leave(self, phase: Phase) -> None:
        """Ends the innermost `phase`, and all phases inside it that are still open. Does nothing if `phase` is not
        open."""
        if phase in self._stack:
            now = self._clock()
            self._seconds[self._stack[-1]] += now - self._since
            self._since = now
            while self._stack.pop() is not phase:
                pass

    def loosely(self, phase: Phase) -> None:
        """Enters a phase whose end can't be seen. It lasts until the next phase is entered."""
        self._charge()
        self._loose = phase

    def take(self) -> dict[Phase, float]:
        """The seconds by phase since the last call."""
        if self._stack or self._loose is not None:
            self._charge()
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        phase = self._stack[-1] if self._stack else self._loose
        if phase is not None:
            self._seconds[phase] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Shown:
    """The training state at one time, in a few bytes; see state_check_sums.py."""

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
    dropped: int = 0  # iterations before it whose gradients were cleared without an optimizer step
    after: Shown | None = None  # the training state at its end
    before: Shown | None = None  # the state before it, in the first segment of a process and after a load
    norm: float | None = None  # of the gradient, at the end of the last backward


class Tally:
    """The segments of the current iteration. `now`: the segment that has not ended."""

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
            whole.dropped += segment.dropped
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


_BEGUN, _GAVE = "_torchaos_begun", "_torchaos_gave"


class Epochs:
    """Finds out when a further epoch begins: with the first backward after a loader of the training had no more
    batches. By then all that the loop does at the end of an epoch, such as a validation or a save, is over. Some loops,
    such as Lightning's, count the batches, and never ask a loader for more than it has. Then an epoch begins with the
    first backward after another iterator has begun."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._after: int | None = None  # the number of steps after which a further epoch begins
        self._last: int | None = None  # an iterator of the training gave its last batch: the number of its step
        careful = agent.careful("samples")
        self.receives, self.exhausted = careful(self._receives), careful(self._exhausted)

    def _receives(self, iterator: Any) -> None:
        """Must be called when the loop has got a batch from this iterator."""
        begins = _BEGUN not in iterator.__dict__
        begun = iterator.__dict__.setdefault(_BEGUN, self._agent.steps_over)
        iterator.__dict__[_GAVE] = self._agent.steps_over, self._agent.backwards
        if begins and self._last is not None:
            self._after, self._last = self._last, None
        if self._agent.steps_over > begun and _is_last(iterator):
            self._last = self._agent.steps_over + 1

    def gives_again(self, iterator: Any) -> bool:
        """Whether this iterator gave a batch before a backward of the current step, so that it is one of the
        training."""
        steps, backwards = iterator.__dict__.get(_GAVE, (-1, 0))
        return bool(steps == self._agent.steps_over and backwards < self._agent.backwards)

    def resets(self, iterator: Any) -> None:
        """Must be called when this iterator begins again."""
        iterator.__dict__.pop(_BEGUN, None)
        iterator.__dict__.pop(_GAVE, None)

    def _exhausted(self, iterator: Any, ahead: int) -> None:
        """Must be called when this iterator has no more batches. `ahead`: how many of its batches the loop has not got
        yet. If there was no step between its first batch and its end, the iterator is not one of the training."""
        begun = iterator.__dict__.pop(_BEGUN, None)
        if begun is not None and self._agent.steps_over > begun:
            self._last = None
            self._after = self._agent.steps_over + ahead

    def backward(self) -> None:
        """Must be called when a backward begins. A fault may fire here."""
        if self._after is not None and self._agent.steps_over >= self._after:
            self._after = None
            self._agent.triggers.enter(Phase.NEW_EPOCH)


def _is_last(iterator: Any) -> bool:
    """Whether the batch that the iterator gave last is its last one. False if its length is not known."""
    try:
        return bool(iterator._num_yielded >= len(iterator))
    except (AttributeError, TypeError, NotImplementedError):
        return False
