"""The batches that the training loop receives, with their dataset indices: from its data loaders, or from a
`queue.Queue` that a thread of the job fills.

Not every batch that is received is trained on: workers draw ahead, Accelerate fetches one batch ahead and draws batches
again to skip them, and evaluation has loaders too. So a batch counts only if it went through a wrapped model in
training. Without a wrapped model, a batch counts if it is among the newest that the loop has when a backward begins. A
batch that a thread of the job has fetched counts when the loop has taken it from the thread, or when the model gets
it."""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...protocol.wire import Phase
from ..agent import Agent
from . import sample_digests
from .batch_ring import BatchRing, TrainedBatches


class QueueHook:
    """Sees which batches the loop takes from a thread of the job. Such a thread passes them by a `queue.Queue`."""

    def __init__(self, agent: Agent, ring: BatchRing) -> None:
        self._agent, self._ring = agent, ring
        self._taken = agent.careful("samples")(self._take)

    def patch(self) -> None:
        """Patches queue.Queue. Must be called before such a thread exists: later, the loop may already wait in `get`
        for its first batch."""
        kind: Any = queue.Queue
        agent, ring, taken, original = self._agent, self._ring, self._taken, kind.get

        @functools.wraps(original)
        def get(this: Any, *args: Any, **kwargs: Any) -> Any:
            item = original(this, *args, **kwargs)
            if ring.has_fetched and agent.on and threading.get_ident() == agent.thread:
                taken(item)
            return item

        kind.get = get

    def _take(self, item: Any) -> None:
        views = sample_digests.look(item)
        if views:
            self._ring.hand_over(views)


_DRAWN = "_torchaos_drawn"
# Modules whose loop fetches the next batch before it yields the current batch, and how many batches it fetches ahead.
_AHEAD = {"accelerate.data_loader": 1}


class LoaderHook:
    """Wraps `__next__`, `_next_index` and `_reset` of the loader's iterators."""

    def __init__(self, agent: Agent, ring: BatchRing, trained: TrainedBatches) -> None:
        self._agent, self._ring, self._trained = agent, ring, trained
        self._wrapped = False  # a DDP or FSDP model was seen: if not idle, its forward enters the phase itself
        self.feeds: Callable[[], None] | None = None  # called with the first batch, unless the job has trained before
        self._inside: set[int] = set()  # threads that are in `__next__`
        self._handover = QueueHook(agent, ring)
        self._receive = agent.careful("samples")(self._receive_batch)

    def model_is_wrapped(self) -> None:
        self._wrapped = True

    def patch(self, module: ModuleType) -> None:
        """Patches torch.utils.data.dataloader."""
        self._cover(module._BaseDataLoaderIter)
        self._handover.patch()

    def patch_stateful(self, module: ModuleType) -> None:
        """Patches torchdata's loader, whose iterators have their own `__next__`."""
        self._cover(module._StatefulBaseDataLoaderIter)

    def _cover(self, iterator: Any) -> None:
        covers = {"__next__": self._cover_next, "_next_index": self._cover_index, "_reset": self._cover_reset}
        for method, cover in covers.items():
            if method in iterator.__dict__:
                setattr(iterator, method, cover(iterator.__dict__[method]))

    def _cover_next(self, original: Any) -> Any:
        agent = self._agent

        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            thread = threading.get_ident()
            if not agent.on or thread in self._inside:
                return original(iterator)
            mine = thread == agent.thread  # otherwise a thread of the job itself fetches ahead
            if mine:
                self._fetch_begins(iterator)
            self._inside.add(thread)
            try:
                value = original(iterator)
            except StopIteration:
                if mine:
                    self._ring.exhausted()
                    agent.epochs.exhausted(iterator, _ahead(sys._getframe(1)))
                raise
            finally:
                self._inside.discard(thread)
                if mine:
                    agent.phases.leave(Phase.DATA)
            self._receive(iterator, value, _ahead(sys._getframe(1)) if mine else None)
            if mine:
                self._loop_goes_on(iterator, value)
            return value

        return __next__

    def _fetch_begins(self, iterator: Any) -> None:
        agent = self._agent
        if agent.changed is not None:
            agent.changed(agent.epochs.gives_again(iterator))
        agent.enter(Phase.DATA)

    def _loop_goes_on(self, iterator: Any, value: Any) -> None:
        """Must be called when the training loop gets the batch. Without a wrapped model, its forward begins now."""
        agent = self._agent
        if agent.lasting.on_batch:
            agent.lasting.receive(value)
        agent.epochs.receives(iterator)
        if not (self._wrapped or self._trained.makes_batches) or self._trained.wrapper_is_idle:
            agent.phases.loosely(Phase.FORWARD)
            if agent.faults.current:
                agent.faults.enter(Phase.FORWARD)

    def _cover_index(self, original: Any) -> Any:
        agent = self._agent

        @functools.wraps(original)
        def _next_index(iterator: Any) -> Any:
            drawn = original(iterator)
            if agent.on:
                iterator.__dict__.setdefault(_DRAWN, deque()).append(drawn)
            return drawn

        return _next_index

    def _cover_reset(self, original: Any) -> Any:
        @functools.wraps(original)
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            iterator.__dict__.pop(_DRAWN, None)  # left over from an epoch that was not finished
            self._agent.epochs.resets(iterator)
            return original(iterator, *args, **kwargs)

        return _reset

    def _receive_batch(self, iterator: Any, value: Any, ahead: int | None) -> None:
        """Adds a received batch to the ring. `ahead`: how many batches the loader holds back; None: a thread of the job
        has fetched the batch."""
        if "samples" not in self._agent.live:
            return
        if self.feeds is not None and not self._trained.makes_batches:
            self.feeds()
            self.feeds = None
        drawn = iterator.__dict__.get(_DRAWN)
        index = drawn.popleft() if drawn else None
        if not getattr(iterator, "_in_order", True):
            index = None  # batches come in any order, as soon as they are ready
        batch = sample_digests.digest(sample_digests.look(value), _indices(index, getattr(iterator, "_dataset", None)))
        if ahead is None:
            self._ring.fetch(batch)
        else:
            self._ring.receive(batch, ahead)


def _indices(drawn: Any, dataset: Any) -> tuple[int, ...] | None:
    """The dataset's indices, if the sampler draws numbers. None otherwise (an IterableDataset draws None). Positions in
    a Subset become indices of the whole dataset, because after a resume the Subset may begin with another sample."""
    try:
        indices = tuple(map(int, drawn if isinstance(drawn, (list, tuple)) else (drawn,)))
        while isinstance(dataset, sys.modules["torch.utils.data"].Subset):
            indices = tuple(int(dataset.indices[index]) for index in indices)
            dataset = dataset.dataset
    except (IndexError, TypeError, ValueError):
        return None
    return indices


def _ahead(caller: Any) -> int:
    return _AHEAD.get(caller.f_globals.get("__name__", ""), 0)
