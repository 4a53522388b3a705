"""The last batches that were fetched, and which of them the job has trained on.

A batch was trained on if its tensors were the inputs of a wrapped model (DDP, FSDP or FSDP2) in training, before a
backward. In a job without a wrapped model, the newest batches that the loop has at a backward count."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ...protocol.wire import Phase
from ..agent import Agent
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
        self._handed_over = False  # the agent has seen the loop take a batch from the thread
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
        """Records that the loop takes from a thread the batch that has these tensors."""
        batch = _of_all(views, list(self._fetched))
        if batch is not None:
            self._handed_over = True
            self._take(batch)

    def owner(self, tensors: Iterable[Any]) -> Batch | None:
        """The batch that was received with exactly these tensor objects, unchanged since then, and that was not trained
        on yet. None if that can't be decided; then `match` compares contents, which takes longer."""
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
        """The batch that has the most of these tensors, by their contents; of several such batches, the oldest that has
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
        trained on last. UNSEEN if there are none, and a thread holds batches that the agent can't see the loop take."""
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
        """Records that the first `handed_out` batches will not be trained on. The newest of them may still be trained
        on in another try."""
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
        self._through_model = False  # a wrapped model has been seen in training
        self._forwards: list[Batch | None] = []  # since the last backward; None: an unknown batch
        self._committed: list[Batch | None] = []
        self._before = 0  # how many of them are older than the last backward
        self._handed_out = 0  # batches that the loop had got at the last backward
        self.wrapper_is_idle = False  # a backward came before any call of a wrapped model

    def forward(self, inputs: Any) -> None:
        """Must be called when a wrapped model gets these inputs in training."""
        self._through_model, self.wrapper_is_idle = True, False
        args, kwargs = inputs
        if (owner := self._ring.owner((*args, *kwargs.values()))) is not None:
            self._forwards.append(owner)
            return
        views = sample_digests.look(inputs)
        batch = self._ring.match(views) if views else None
        if batch is None and views and not (self._ring.has_fresh() or self._ring.is_blind):
            batch = sample_digests.digest(views)  # there is no loader, or no loader feeds the model
        self._forwards.append(batch)

    def forward_failed(self) -> None:
        """Must be called when the forward raised an exception: nothing is trained on its inputs."""
        self._forwards = self._forwards[:-1]

    def backward(self) -> None:
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


class ForwardHook:
    """Hooks the forward of wrapped models. `wrapped` is called whenever a model is wrapped; `trained` gets the inputs
    of each training forward; `failed` is called if that forward raises an exception."""

    def __init__(
        self, agent: Agent, wrapped: Callable[[], None], trained: Callable[[Any], None], failed: Callable[[], None]
    ) -> None:
        self._agent, self._wrapped = agent, agent.careful("samples")(wrapped)
        self._trained, self._failed = agent.careful("samples")(trained), agent.careful("samples")(failed)
        self._depth = 0

    def patch_ddp(self, module: ModuleType) -> None:
        self._patch_wrapper(module.DistributedDataParallel)

    def patch_fsdp(self, module: ModuleType) -> None:
        self._patch_wrapper(module.FullyShardedDataParallel)

    def patch_fsdp2(self, module: ModuleType) -> None:
        """Patches FSDP2, which wraps no module: it adds a hook before the module's forward."""
        from torch import is_grad_enabled

        state = module.FSDPState
        self._cover_init(state)
        original = state._root_pre_forward

        @functools.wraps(original)
        def _root_pre_forward(fsdp: Any, model: Any, args: Any, kwargs: Any) -> Any:
            context = getattr(fsdp, "_state_ctx", None)
            is_root = getattr(context, "iter_forward_root", None) is None
            if self._agent.on and is_root and is_grad_enabled() and model.training:
                self._begins((args, kwargs))
                try:
                    self._agent.enter(Phase.FORWARD)
                except BaseException:
                    self._failed()
                    raise
                self._agent.phases.leave(Phase.FORWARD)
                self._agent.phases.loosely(Phase.FORWARD)  # until the backward
            return original(fsdp, model, args, kwargs)

        state._root_pre_forward = _root_pre_forward

    def _patch_wrapper(self, wrapper: Any) -> None:
        from torch import is_grad_enabled

        self._cover_init(wrapper)
        agent, original = self._agent, wrapper.forward

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            # The flag of the wrapped module is read, because Lightning does not set the wrapper's flag.
            if not agent.on or self._depth or not is_grad_enabled() or not getattr(model, "module", model).training:
                return original(model, *args, **kwargs)
            self._begins((args, kwargs))
            try:
                agent.enter(Phase.FORWARD)
                self._depth = 1
                return original(model, *args, **kwargs)
            except BaseException:
                self._failed()
                raise
            finally:
                self._depth = 0
                agent.phases.leave(Phase.FORWARD)

        wrapper.forward = forward

    def _begins(self, inputs: Any) -> None:
        if self._agent.changed is not None:
            self._agent.changed(True)
        if self._agent.state_begins is not None:
            self._agent.state_begins(Phase.FORWARD, inputs)
        self._trained(inputs)

    def _cover_init(self, kind: Any) -> None:
        original, wrapped = kind.__init__, self._wrapped

        @functools.wraps(original)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            wrapped()
            original(model, *args, **kwargs)

        kind.__init__ = __init__
