"""The last batches that were fetched for the training loop, and which of them it has trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from .digests import Batch, Known, View

_RING = 256
UNSEEN = Batch(None)  # stands for a batch that the loop took from a thread without being observed


class Ring:
    """The last batches that were fetched for the training loop. A loader or a thread may still hold some of them back
    from the loop."""

    def __init__(self) -> None:
        self._received: deque[Batch] = deque()
        self._fetched: deque[Batch] = deque(maxlen=_RING)  # fetched by a thread; the loop has not got them yet
        self._handed_over = False  # it was seen that the loop takes batches from the thread
        self._fresh: dict[Batch, None] = {}  # not trained on yet, oldest first
        self._ahead = self._count = 0
        self._last: Batch | None = None  # the batch that was trained on last
        # By the id of a tensor: the tensor and its batch. The batch is None if several untrained batches contain the
        # tensor.
        self._tensors: dict[int, tuple[Known, Batch | None]] = {}

    def receive(self, batch: Batch, ahead: int) -> None:
        """Adds a batch. `ahead`: how many batches, including this one, the loader still holds back from the loop."""
        if len(self._received) == _RING:
            oldest = self._received.popleft()
            self._fresh.pop(oldest, None)
            for tensor in oldest.tensors:
                self._tensors.pop(tensor.id, None)
        self._received.append(batch)
        for tensor in batch.tensors:
            other, owner = self._tensors.get(tensor.id, (None, None))
            alive = other is not None and other.reference() is not None
            self._tensors[tensor.id] = tensor, None if alive and (owner is None or owner in self._fresh) else batch
        self._fresh[batch] = None
        self._ahead = ahead
        self._count += 1

    def exhausted(self) -> None:
        """Notes that the loader has no more batches. So the loop has got all batches that were fetched ahead."""
        self._ahead = 0

    def fetch(self, batch: Batch) -> None:
        """Records that a thread of the job has fetched a batch. The loop gets the batch later."""
        self._fetched.append(batch)

    @property
    def has_fetched(self) -> bool:
        return bool(self._fetched)

    def hand_over(self, views: Sequence[View]) -> None:
        """Records that the loop takes from a thread the batch that has these tensors."""
        batch = _of_all(views, list(self._fetched))
        if batch is not None:
            self._handed_over = True
            self._take(batch)

    def owner(self, tensors: Iterable[Any]) -> Batch | None:
        """The batch that was received with these tensor objects, unchanged, and not trained on yet. None if that can't
        be decided; then `match` compares contents, which takes longer."""
        owners = set()
        for tensor in tensors:
            known, batch = self._tensors.get(id(tensor), (None, None))
            if known is None or batch is None or not known.is_still(tensor):
                return None
            owners.add(batch)
        if len(owners) != 1 or self._fetched:
            return None
        (batch,) = owners
        return batch if batch in self._fresh else None

    def match(self, views: Sequence[View]) -> Batch | None:
        """The batch that has the most of these tensors; of several such batches, the oldest that has not been trained
        on. None if no batch has any of the tensors, or if different batches have the same tensor (a mask)."""
        fetched = list(self._fetched)
        batch = _of_all(views, [*self._fresh, *fetched]) or _of_some(views, [*self._received, *fetched])
        if batch in fetched:
            self._take(batch)
        return batch

    def _take(self, batch: Batch) -> None:
        self._fetched.remove(batch)
        self.receive(batch, 0)

    def newest(self, count: int) -> list[Batch]:
        """The newest `count` batches that the loop has and has not trained on. If there are none: the batch that was
        trained on last. UNSEEN if a thread holds batches and the batches that the loop takes can't be observed."""
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
        """Whether the loop has a batch that has not been trained on."""
        place = len(self._received) - self._ahead - 1
        return place >= 0 and not self._received[place].used

    @property
    def is_blind(self) -> bool:
        """Whether a thread holds batches, and the loop was never observed to take a batch from it."""
        return bool(self._fetched) and not self._handed_over

    @property
    def handed_out(self) -> int:
        """The number of batches that the loop has got so far."""
        return self._count - self._ahead

    def pass_over(self, handed_out: int) -> None:
        """Records that the first `handed_out` batches will not be trained on. The newest of them may still be trained
        on in another try."""
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
    return _alike([batch for batch, has in zip(batches, common, strict=True) if has == best]) if best[0] else None


def _alike(batches: Sequence[Batch]) -> Batch | None:
    """The first of these batches if all have the same tensors, else None."""
    same = bool(batches) and all(batch.marks == batches[0].marks for batch in batches)
    return batches[0] if same else None
