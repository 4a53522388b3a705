"""The last batches that were fetched, and which of them the job has trained on.

A batch was trained on if its tensors went, in training, into a model whose forward is seen (forward_hooks.py), before a
backward. Inputs that come from no loader are a batch of their own. In a job that has a loader and no wrapped model, the
newest batches that the loop has at a backward count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from . import sample_digests
from .sample_digests import Batch, KnownTensor, SampleView

_RING = 256
UNSEEN = Batch(None)  # stands for a batch that the loop took from a thread, unseen by the agent


class BatchRing:
    """The last batches that were fetched for the training loop. A loader or a thread may still hold some of them back
    from the loop."""

    def __init__(self) -> None:
        self._received: deque[Batch] = deque()
        self._fetched: deque[Batch] = deque(maxlen=_RING)  # fetched by a thread; the loop has not got them yet
        self._handed_over = False  # the agent has seen that the loop took a batch from the thread
        self._fresh: dict[Batch, None] = {}  # not trained on yet, oldest first
        self._ahead = self._count = 0
        self._last: Batch | None = None  # the batch that was trained on last
        # By the id of a tensor: the tensor and its batch. The batch is None if several untrained batches contain the
        # tensor.
        self._tensors: dict[int, tuple[KnownTensor, Batch | None]] = {}

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

    def hand_over(self, views: Sequence[SampleView]) -> None:
        """Records that the loop takes a batch from a thread: the batch that has these tensors."""
        batch = _of_all(views, list(self._fetched))
        if batch is not None:
            self._handed_over = True
            self._take(batch)

    def owner(self, tensors: Iterable[Any]) -> Batch | None:
        """The untrained batch that was received with exactly these tensor objects, if the tensors are unchanged. None
        if that can't be decided; then `match` compares contents, which takes longer."""
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

    def match(self, views: Sequence[SampleView]) -> Batch | None:
        """The batch that has the most of these tensors, by their contents. If several have as many: the oldest that has
        not been trained on. None if no batch has any of the tensors, or if several batches with different tensors fit
        equally well."""
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
        trained on last or, if a thread holds batches and the agent can't see the loop take them, UNSEEN."""
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
        """Whether a thread holds batches, and the agent has never seen the loop take one from it."""
        return bool(self._fetched) and not self._handed_over

    @property
    def handed_out(self) -> int:
        """The number of batches that the loop has got so far."""
        return self._count - self._ahead

    def pass_over(self, handed_out: int) -> None:
        """Records that the first `handed_out` batches will not be trained on. Only the newest of these may still be, in
        another try."""
        for batch in list(self._received)[: max(0, len(self._received) - (self._count - handed_out))]:
            if not batch.used:
                self.use(batch)

    def use(self, batch: Batch) -> None:
        batch.used = True
        self._fresh.pop(batch, None)
        self._last = batch


def _of_all(views: Sequence[SampleView], batches: Sequence[Batch]) -> Batch | None:
    marks = {view.mark() for view in views}
    return _alike([batch for batch in batches if marks <= batch.marks]) if marks else None


def _of_some(views: Sequence[SampleView], batches: Sequence[Batch]) -> Batch | None:
    marks = {view.mark() for view in views}
    common = [(len(batch.marks & marks), not batch.used) for batch in batches]
    best = max(common, default=(0, False))
    return _alike([batch for batch, has in zip(batches, common, strict=True) if has == best]) if best[0] else None


def _alike(batches: Sequence[Batch]) -> Batch | None:
    """The first of these batches if all have the same tensors, else None."""
    same = bool(batches) and all(batch.marks == batches[0].marks for batch in batches)
    return batches[0] if same else None


class TrainedBatches:
    """Collects the batches on which the current segment trains; `take` returns them at its end."""

    def __init__(self, ring: BatchRing) -> None:
        self._ring = ring
        self._through_model = False  # the forward of a model has been seen in training
        self._forwards: list[Batch | None] = []  # since the last backward; None: an unknown batch
        self._committed: list[Batch | None] = []
        self._before = 0  # how many of them are older than the last backward
        self._handed_out = 0  # batches that the loop had got at the last backward
        self.wrapper_is_idle = False  # a backward came before any call of a wrapped model
        self._own: Batch | None = None  # the inputs of the last forward that no loader had given
        self.makes_batches = False  # the job has trained on inputs that no loader had given
        self._evaluated = False  # a model was called without training since the last backward

    def forward(self, inputs: Any) -> None:
        """Must be called when a model gets these inputs in training."""
        self._through_model, self.wrapper_is_idle = True, False
        args, kwargs = inputs
        if (owner := self._ring.owner((*args, *kwargs.values()))) is not None:
            self._forwards.append(owner)
            return
        views = sample_digests.look(inputs)
        batch = self._ring.match(views) if views else None
        if batch is None and views and not self._loader_feeds():
            own = sample_digests.digest(views)
            if self._own is None or (own.samples, own.tensors) != (self._own.samples, self._own.tensors):
                self._own = own  # otherwise a further forward of the same inputs, as in each call of a closure
            batch = self._own
        self._forwards.append(batch)

    def evaluates(self) -> None:
        """Must be called when a model is called without training."""
        self._evaluated = True

    def _loader_feeds(self) -> bool:
        """Whether inputs that match no batch of a loader may still come from a loader. They may not if the job makes
        its own batches, and has a loader only for evaluation."""
        if self._ring.is_blind or not self.makes_batches:
            return self._ring.is_blind or self._ring.has_fresh()
        return self._ring.handed_out > self._handed_out and not self._evaluated

    def forward_failed(self) -> None:
        """Must be called when the forward raised an exception: nothing is trained on its inputs."""
        self._forwards = self._forwards[:-1]

    def forget_forwards(self) -> None:
        """Must be called when forwards are not seen any more."""
        self._through_model, self._forwards, self._own = False, [], None

    def backward(self) -> None:
        self.makes_batches = self.makes_batches or (self._own is not None and self._own in self._forwards)
        self._evaluated = False
        self._before = len(self._committed)
        self._committed += self._forwards if self._through_model else [None]
        self._forwards = []
        self.wrapper_is_idle = not self._through_model
        self._handed_out = self._ring.handed_out

    def backward_failed(self) -> None:
        """Must be called when the backward raised an exception: it left no gradient of its batches."""
        del self._committed[self._before :]

    def drop(self) -> None:
        """Forgets the batches since the last segment, because their gradients were thrown away."""
        self._committed = []
        self._ring.pass_over(self._handed_out)

    def put_back(self) -> None:
        """Must be called when the job loads an earlier state. The batches since the last segment will not be trained
        on."""
        if self._forwards or self._committed:
            for batch in self._forwards:
                if batch is not None:
                    self._ring.use(batch)
            self._forwards = []
            self.drop()

    def take(self) -> list[Batch]:
        """The batches of the segment that has ended, each once."""
        self._own = None
        if len(self._committed) == 1 and (only := self._committed[0]) is not None:  # the same as below, but quicker
            self._committed = []
            self._ring.use(only)
            return [only]
        known = list(dict.fromkeys(batch for batch in self._committed if batch is not None))
        unknown = self._committed.count(None)
        self._committed = []
        batches = known + [batch for batch in (self._ring.newest(unknown) if unknown else []) if batch not in known]
        for batch in batches:
            self._ring.use(batch)
        return batches
