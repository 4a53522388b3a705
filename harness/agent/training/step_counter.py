"""Finds out when an iteration of the trainer ends, from its backwards and optimizer steps; and collects what was seen
in the current iteration: its segments (`Tally`), the seconds of its phases (`Phases`), and whether a further epoch
began (`Epochs`). Independent of torch; standard library only.

A *segment* ends with an optimizer step that had a backward before it. With one optimizer, a segment is an iteration.
With several (a GAN: backward, D, backward, G), the iteration ends when all of them have stepped, or when an optimizer
steps again after a backward of its own. In the second case, the counter from then on does not wait for the optimizers
that had not stepped.

If some optimizers step more often than others (five steps of a critic for each step of a generator), nothing shows
where a cycle begins, and a resumed process may begin anywhere in the cycle. So each step with a backward of its own is
then an iteration, and the count is the same wherever the process begins. Steps of other optimizers that follow without
a backward belong to the same iteration."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol import wire
from ...protocol.wire import Phase
from ..batches.sample_digests import Batch

if TYPE_CHECKING:
    from ..agent import Agent


_UNEVEN, _LOOSE = "uneven-a{attempt}", "loose-a{attempt}-r{rank}"  # files beside the plan


class OptimizerTurns:
    """Remembers across restarts how the optimizers take turns: whether some step more often than others, and which do
    not step in each iteration. Without this, a step could count as an iteration before a restart, and as a part of an
    iteration after it; and the first iteration after a restart could end with another optimizer's step than before."""

    def __init__(self, attempt: int, rank: int) -> None:
        self._folder, self._attempt, self._rank = Path(os.environ[wire.ENV_PLAN]).parent, attempt, rank
        self._noted = False

    def is_uneven(self, optimizers: Sequence[Any]) -> bool:
        """Whether an earlier attempt found that some optimizers step more often than others. False for a job that
        begins from scratch (its optimizers have no state), because its steps must be counted as in the first
        attempt."""
        return any(file.exists() for file in self._of_earlier(_UNEVEN, optimizers))

    def loose(self, optimizers: Sequence[Any]) -> list[Any]:
        """The optimizers that did not step in each iteration of this rank in an earlier attempt. Empty for a job that
        begins from scratch."""
        files = [file for file in self._of_earlier(_LOOSE, optimizers) if file.exists()]
        if not (known := {line for file in files for line in file.read_text().splitlines()}):
            return []
        return [each for each, name in zip(optimizers, _names(optimizers), strict=True) if name in known]

    def note(self) -> None:
        """Records that in this attempt some optimizers step more often than others."""
        if not self._noted:
            self._noted = True
            (self._folder / _UNEVEN.format(attempt=self._attempt)).touch(0o600)

    def note_loose(self, optimizers: Sequence[Any], loose: Collection[Hashable]) -> None:
        """Records which of the optimizers do not step in each iteration of this attempt. `loose`: their ids."""
        lines = [name for each, name in zip(optimizers, _names(optimizers), strict=True) if id(each) in loose]
        (self._folder / _LOOSE.format(attempt=self._attempt, rank=self._rank)).write_text("\n".join(lines))

    def _of_earlier(self, name: str, optimizers: Sequence[Any]) -> list[Path]:
        if not any(optimizer.state for optimizer in optimizers):
            return []
        return [self._folder / name.format(attempt=number, rank=self._rank) for number in range(self._attempt)]


def _names(optimizers: Sequence[Any]) -> list[str]:
    """A name of each optimizer by which it is known after a restart: its class, the shapes of what it trains, and its
    number among the optimizers with the same class and shapes."""
    kinds = [
        f"{type(each).__name__} {[[[*own.shape] for own in group['params']] for group in each.param_groups]}"
        for each in optimizers
    ]
    return [f"{kinds[:place].count(kind)} of {kinds.count(kind)}: {kind}" for place, kind in enumerate(kinds)]


@dataclass(frozen=True)
class Closed:
    """The parts of an iteration that a call has ended: a segment (`segment`), the iteration before that segment
    (`before`), or the iteration with that segment (`after`). `stray`: the call is an optimizer step of an iteration
    that had already ended."""

    segment: bool = False
    before: bool = False
    after: bool = False
    stray: bool = False


NOTHING, STRAY, WHOLE = Closed(), Closed(stray=True), Closed(segment=True, after=True)
IN_BACKWARD = "in backward"  # all optimizers that step inside a backward count as one


class StepCounter:
    """Counts iterations from backwards and optimizer steps. `uneven`: whether some optimizers step more often than
    others. `loose`: the optimizers that had not stepped when an iteration was over; the counter does not wait for them.
    The counter finds both by itself; the caller may also set them."""

    def __init__(self) -> None:
        self.uneven = False
        self._made: set[Hashable] = set()  # optimizers that exist and may yet step
        self._seen: set[Hashable] = set()  # optimizers that have stepped
        self._leading: set[Hashable] = set()  # optimizers that have stepped with a backward of their own
        self.loose: set[Hashable] = set()
        self._follow: dict[Hashable, set[Hashable]] = {}  # by leading optimizer: those that stepped after its backward
        self._stepped: set[Hashable] = set()  # in the current iteration
        self._leader: Hashable | None = None  # the leading optimizer of the segment before
        self.fresh = False  # a backward has ended since the last segment
        self._alone: Hashable | None = None  # the only optimizer, if each of its steps after a backward is an iteration
        self.ever_backward = False
        self._backward_depth = 0
        self.open_steps: list[Hashable] = []  # optimizers whose step is being called, the outermost first
        self._stepped_in_backward = False
        self._raw: Hashable | None = None  # the first optimizer, in a process without any backward

    @property
    def has_followers(self) -> bool:
        return bool(self._follow)

    def has_stepped(self, key: Hashable) -> bool:
        return key in self._seen

    def made(self, key: Hashable) -> None:
        self._made.add(key)
        self._alone = None

    def gone(self, key: Hashable) -> None:
        self._forget(key)
        self.loose.discard(key)
        self._stepped.discard(key)
        self._follow.pop(key, None)

    def _forget(self, key: Hashable) -> None:
        """From now on, iterations do not wait for this optimizer."""
        self._alone = None
        self._made.discard(key)
        self._seen.discard(key)
        self._leading.discard(key)

    def backward_begin(self) -> None:
        self._backward_depth += 1
        self.ever_backward = True

    def backward_end(self, ok: bool = True) -> Closed:
        """Notes that a backward ended, and returns the parts of the iteration that ended with it. `ok`: False if the
        backward raised an exception, so that it left no gradient."""
        self._backward_depth -= 1
        if self._backward_depth or not ok:
            return NOTHING
        self.fresh = True
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            return self._segment(IN_BACKWARD)
        return NOTHING

    def step_begin(self, key: Hashable) -> None:
        if key in self.open_steps:  # that call raised an exception, which no hook sees
            self.step_failed(key)
        if self.open_steps:  # an optimizer inside another one: the outer one counts
            self._forget(key)
        self.open_steps.append(key)

    def step_failed(self, key: Hashable) -> None:
        """Notes that an optimizer's step raised an exception, and with it all steps inside that step."""
        if key in self.open_steps:
            del self.open_steps[self.open_steps.index(key) :]

    def step_end(self, key: Hashable) -> Closed:
        """Notes that an optimizer step ended, and returns the parts of the iteration that ended with it. The caller
        also reports steps that a GradScaler skips."""
        while self.open_steps and self.open_steps.pop() != key:
            pass
        if self.open_steps:
            return NOTHING
        if self._backward_depth:
            self._forget(key)
            self._stepped_in_backward = True
            return NOTHING
        if self.fresh and key == self._alone:  # the same as below, but quicker
            self.fresh = False
            return WHOLE
        closed = self._segment(key)
        only = self._leading == self._made | self._seen == {key}
        self._alone = key if only and not (self.uneven or self.loose or self._follow or self._stepped) else None
        return closed

    def dropped(self, key: Hashable) -> bool:
        """Notes that an optimizer's gradients were cleared. Returns whether a backward is lost thereby: no step has
        used its gradients, and no other optimizer can."""
        nothing = self.fresh and not self.open_steps and not self._backward_depth and self._made | self._seen == {key}
        self.fresh = self.fresh and not nothing
        return nothing

    def finish(self) -> Closed:
        """Notes that the job has ended. Closes an iteration that was left open because a further optimizer step could
        have belonged to it."""
        left, self._stepped = self._stepped, set()
        return Closed(after=bool(left))

    def _segment(self, key: Hashable) -> Closed:
        if not self.ever_backward:
            self._raw = key if self._raw is None else self._raw
            return WHOLE if key == self._raw else STRAY
        fresh, self.fresh = self.fresh, False
        self._seen.add(key)
        if not fresh:  # no backward of its own: the step is part of the segment before
            if not self._stepped:
                return STRAY
            self._stepped.add(key)
            if key != self._leader:
                self._follow.setdefault(self._leader, set()).add(key)
            return Closed(segment=True, after=self._close_if_complete())
        before = self._comes_again(key)
        self._leading.add(key)
        self._leader = key
        self._stepped.add(key)
        return Closed(True, before, self._close_if_complete())

    def _comes_again(self, key: Hashable) -> bool:
        """Whether this step, which has a backward of its own, shows that an iteration ended before it."""
        again = key in self._stepped
        self.uneven = self.uneven or key in self.loose
        if not self._stepped or not (again or self.uneven):
            return False
        left_out = self._due() - self._stepped
        self.uneven = self.uneven or bool(left_out & self._leading)
        self.loose |= left_out
        self._stepped = set()
        return True

    def _due(self) -> set[Hashable]:
        """The optimizers that are expected to step in the current iteration."""
        if self.uneven:
            return {self._leader, *self._follow.get(self._leader, ())} - self.loose
        return (self._made | self._seen) - self.loose

    def _close_if_complete(self) -> bool:
        complete = self._stepped >= self._due()
        if complete:
            self._stepped = set()
        return complete


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

    def had(self, phase: Phase) -> bool:
        """Whether the phase has begun since the last `take`."""
        return phase in self._seconds or phase in self._stack

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
    # Of the gradient, at the end of the last backward. In a step of several optimizers: the root of the sum of squares.
    norm: float | None = None


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
        """The finished segments of an iteration, joined. If `with_last` is false, without the last segment, which
        belongs to the next iteration."""
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
                whole.norm = math.hypot(whole.norm or 0.0, segment.norm)
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
    batches. By then, all that the loop does at the end of an epoch, such as a validation or a save, is over. Some
    loops, such as Lightning's, count the batches and never ask a loader for more than it has. There, an epoch begins
    with the first backward after another iterator has begun."""

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
            self._agent.faults.enter(Phase.NEW_EPOCH)


def _is_last(iterator: Any) -> bool:
    """Whether the batch that the iterator gave last is its last one. False if its length is not known."""
    try:
        return bool(iterator._num_yielded >= len(iterator))
    except (AttributeError, TypeError, NotImplementedError):
        return False
