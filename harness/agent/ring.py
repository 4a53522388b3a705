"""The batches that the loop has received, and which of them it has in hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .digests import Batch, View

_RING = 256
UNSEEN = Batch(None)  # stands for one that the loop took from a thread without being seen


class Ring:
    """The batches received last."""

    def __init__(self) -> None:
        self._received: deque[Batch] = deque()
        self._fetched: deque[Batch] = deque(maxlen=_RING)  # by a thread; the loop has not been given them yet
        self._handed_over = False  # it was seen how the loop takes them from the thread
        self._fresh: dict[Batch, None] = {}  # not trained on yet, in order
        self._ahead = self._count = 0
        self._last: Batch | None = None  # trained on last

    def receive(self, batch: Batch, ahead: int) -> None:
        if len(self._received) == _RING:
            self._fresh.pop(self._received.popleft(), None)
        self._received.append(batch)
        self._fresh[batch] = None
        self._ahead = ahead
        self._count += 1

    def exhausted(self) -> None:
        """The loader has no more: whatever was fetched ahead is handed out now."""
        self._ahead = 0

    def fetch(self, batch: Batch) -> None:
        """A thread of the job's own has it: it is in hand when the loop takes it."""
        self._fetched.append(batch)

    @property
    def has_fetched(self) -> bool:
        return bool(self._fetched)

    def hand_over(self, views: Sequence[View]) -> None:
        """The loop takes from a thread what consists of these."""
        batch = _of_all(views, list(self._fetched))
        if batch is not None:
            self._handed_over = True
            self._take(batch)

    def match(self, views: Sequence[View]) -> Batch | None:
        """The batch that these come from: that with which they have most in common, of equals the oldest that has not
        been trained on. None where they have nothing in common, or what they have is the same in different batches (a
        mask)."""
        fetched = list(self._fetched)
        batch = _of_all(views, [*self._fresh, *fetched]) or _of_some(views, [*self._received, *fetched])
        if batch in fetched:
            self._take(batch)
        return batch

    def _take(self, batch: Batch) -> None:
        self._fetched.remove(batch)
        self.receive(batch, 0)

    def newest(self, count: int) -> list[Batch]:
        """The newest `count` in hand that have not been trained on. Where there are none it is the last one trained on,
        or UNSEEN if a thread has batches and nobody sees which of them the loop takes."""
        in_hand = list(self._received)[: len(self._received) - self._ahead]
        fresh: list[Batch] = []
        for batch in reversed(in_hand):
            if batch.used or len(fresh) == count:
                break
            fresh.insert(0, batch)
        if not fresh and self.is_blind:
            return [UNSEEN]
        return fresh or ([self._last] if self._last is not None else [])

    def has_fresh(self) -> bool:
        """Whether there is a batch in hand that has not been trained on."""
        place = len(self._received) - self._ahead - 1
        return place >= 0 and not self._received[place].used

    @property
    def is_blind(self) -> bool:
        """Whether a thread has batches, and how the loop takes them can't be seen."""
        return bool(self._fetched) and not self._handed_over

    @property
    def handed_out(self) -> int:
        """How many batches the loop has been given by now."""
        return self._count - self._ahead

    def pass_over(self, handed_out: int) -> None:
        """What had been handed out by then led to nothing. The newest of it may be tried again."""
        for batch in list(self._received)[: max(0, len(self._received) - (self._count - handed_out))]:
            if not batch.used:
                self.use(batch)

    def use(self, batch: Batch) -> None:
        batch.used = True
        self._fresh.pop(batch, None)
        self._last = batch


def _of_all(views: Sequence[View], batches: Sequence[Batch]) -> Batch | None:
    marks = {view.mark() for view in views}
    return _alike([batch for batch in batches if marks <= batch.marks]) if marks else None


def _of_some(views: Sequence[View], batches: Sequence[Batch]) -> Batch | None:
    marks = {view.mark() for view in views}
    common = [(len(batch.marks & marks), not batch.used) for batch in batches]
    best = max(common, default=(0, False))
    return _alike([one for one, has in zip(batches, common, strict=True) if has == best]) if best[0] else None


def _alike(batches: Sequence[Batch]) -> Batch | None:
    """The first of these, where they are the same."""
    same = bool(batches) and all(one.marks == batches[0].marks for one in batches)
    return batches[0] if same else None
