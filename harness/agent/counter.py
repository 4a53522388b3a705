"""When a trainer's iteration is over, from the calls that can be seen. Pure, and it knows nothing of torch.

A *segment* ends with an optimizer step that had a backward before it. Where one optimizer steps, a segment is an
iteration. Where several do (a GAN: backward, D, backward, G), an iteration is over when one of them comes round again
with a backward of its own; once the set is known, it is over at the end of the last of the set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable


@dataclass(frozen=True)
class Closed:
    """What the end of a call closed: a segment, the iteration before that segment, the iteration with it.
    `stray`: it was a step that belongs to an iteration which is over already."""

    segment: bool = False
    before: bool = False
    after: bool = False
    stray: bool = False


NOTHING, STRAY = Closed(), Closed(stray=True)
IN_BACKWARD = "in backward"  # all optimizers that step inside a backward count as one


class StepCounter:
    def __init__(self) -> None:
        self._made: set[Hashable] = set()  # optimizers that exist and may yet step
        self._set: set[Hashable] = set()  # those that step in an iteration, as far as is known
        self._learned = False  # a whole round has been seen
        self._stepped: set[Hashable] = set()  # in the iteration under way
        self._fresh = False  # a backward since the last segment
        self._ever_backward = False
        self._backward_depth = 0
        self._steps: list[Hashable] = []  # calls of step under way, the outermost first
        self._stepped_in_backward = False
        self._raw: Hashable | None = None  # the first optimizer, in a process without any backward

    @property
    def ever_backward(self) -> bool:
        return self._ever_backward

    def made(self, key: Hashable) -> None:
        self._made.add(key)

    def gone(self, key: Hashable) -> None:
        self._made.discard(key)
        self._set.discard(key)
        self._stepped.discard(key)

    def backward_begin(self) -> None:
        self._backward_depth += 1
        self._ever_backward = True

    def backward_end(self, ok: bool = True) -> Closed:
        """`ok` False: it ended in an exception, so no gradient came of it."""
        self._backward_depth -= 1
        if self._backward_depth or not ok:
            return NOTHING
        self._fresh = True
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            return self._segment(IN_BACKWARD)
        return NOTHING

    def step_begin(self, key: Hashable) -> None:
        if key in self._steps:  # that call ended in an exception, which nobody could see
            del self._steps[self._steps.index(key) :]
        if self._steps:  # an optimizer inside another one: the outer one counts
            self._made.discard(key)
            self._set.discard(key)
        self._steps.append(key)

    def step_end(self, key: Hashable) -> Closed:
        """The end of a step, or of one that a GradScaler left out (the caller begins and ends it all the same)."""
        while self._steps and self._steps.pop() != key:
            pass
        if self._steps:
            return NOTHING
        if self._backward_depth:
            self._made.discard(key)
            self._set.discard(key)
            self._stepped_in_backward = True
            return NOTHING
        return self._segment(key)

    def dropped(self, key: Hashable) -> bool:
        """The gradients of an optimizer are thrown away. Whether what led to them came to nothing: a backward that no
        step has followed, where there is no other optimizer that it may have been for."""
        nothing = self._fresh and not self._steps and not self._backward_depth and self._made | self._set == {key}
        self._fresh = self._fresh and not nothing
        return nothing

    def finish(self) -> Closed:
        """The job is over: an iteration that only waited to be told from the next is over too."""
        left, self._stepped = self._stepped, set()
        return Closed(after=bool(left))

    def _segment(self, key: Hashable) -> Closed:
        if not self._ever_backward:
            self._raw = key if self._raw is None else self._raw
            return Closed(segment=True, after=True) if key == self._raw else STRAY
        fresh, self._fresh = self._fresh, False
        if not fresh:  # no backward of its own: it belongs to the segment before
            self._set.add(key)
            if not self._stepped:
                return STRAY
            self._stepped.add(key)
            return Closed(segment=True, after=self._close_if_complete())
        before = key in self._stepped
        if before:
            self._set, self._stepped, self._learned = set(self._stepped), set(), True
        self._stepped.add(key)
        self._set.add(key)
        return Closed(True, before, self._close_if_complete())

    def _close_if_complete(self) -> bool:
        alone = len(self._made | self._set) <= 1
        complete = (self._learned or alone) and self._stepped >= self._set
        if complete:
            self._stepped = set()
        return complete
