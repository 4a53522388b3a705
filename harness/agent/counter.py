"""When a trainer's iteration is over, from the calls that can be seen. Pure, and it knows nothing of torch.

A *segment* ends with an optimizer step that had a backward before it. Where one optimizer steps, a segment is an
iteration. Where several do (a GAN: backward, D, backward, G), it is over when all of them have stepped, or when one of
them comes round again with a backward of its own; an optimizer that was left out so is not waited for any more.

Where they step unequally often (five steps of a critic for each of a generator), nothing says where a cycle begins, and
a process that resumes may begin anywhere in it. So each step with a backward of its own is an iteration there: that is
the same wherever one begins. Optimizers that follow it without a backward of their own are part of it.
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
    """`uneven`: optimizers are known to step unequally often, or turned out to."""

    def __init__(self) -> None:
        self.uneven = False
        self._made: set[Hashable] = set()  # optimizers that exist and may yet step
        self._seen: set[Hashable] = set()  # those that have stepped
        self._leading: set[Hashable] = set()  # those of them that have stepped with a backward of their own
        self._loose: set[Hashable] = set()  # those that an iteration was over without
        self._follow: dict[Hashable, set[Hashable]] = {}  # by the leading one: those that stepped after its backward
        self._stepped: set[Hashable] = set()  # in the iteration under way
        self._leader: Hashable | None = None  # of the segment before
        self._fresh = False  # a backward since the last segment
        self._ever_backward = False
        self._backward_depth = 0
        self._steps: list[Hashable] = []  # calls of step under way, the outermost first
        self._stepped_in_backward = False
        self._raw: Hashable | None = None  # the first optimizer, in a process without any backward

    @property
    def ever_backward(self) -> bool:
        return self._ever_backward

    @property
    def has_followers(self) -> bool:
        return bool(self._follow)

    def made(self, key: Hashable) -> None:
        self._made.add(key)

    def gone(self, key: Hashable) -> None:
        self._forget(key)
        self._loose.discard(key)
        self._stepped.discard(key)
        self._follow.pop(key, None)

    def _forget(self, key: Hashable) -> None:
        """Nobody waits for it."""
        self._made.discard(key)
        self._seen.discard(key)
        self._leading.discard(key)

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
            self._forget(key)
        self._steps.append(key)

    def step_end(self, key: Hashable) -> Closed:
        """The end of a step, or of one that a GradScaler left out (the caller begins and ends it all the same)."""
        while self._steps and self._steps.pop() != key:
            pass
        if self._steps:
            return NOTHING
        if self._backward_depth:
            self._forget(key)
            self._stepped_in_backward = True
            return NOTHING
        return self._segment(key)

    def dropped(self, key: Hashable) -> bool:
        """The gradients of an optimizer are thrown away. Whether what led to them came to nothing: a backward that no
        step has followed, where there is no other optimizer that it may have been for."""
        nothing = self._fresh and not self._steps and not self._backward_depth and self._made | self._seen == {key}
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
        self._seen.add(key)
        if not fresh:  # no backward of its own: it belongs to the segment before
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
        """Whether a step with a backward of its own shows that an iteration was over before it."""
        again = key in self._stepped
        self.uneven = self.uneven or key in self._loose
        if not self._stepped or not (again or self.uneven):
            return False
        left_out = self._due() - self._stepped
        self.uneven = self.uneven or bool(left_out & self._leading)
        self._loose |= left_out
        self._stepped = set()
        return True

    def _due(self) -> set[Hashable]:
        """Who steps in the iteration under way, as far as is known."""
        if self.uneven:
            return {self._leader, *self._follow.get(self._leader, ())} - self._loose
        return (self._made | self._seen) - self._loose

    def _close_if_complete(self) -> bool:
        complete = self._stepped >= self._due()
        if complete:
            self._stepped = set()
        return complete
