"""The batches that the loop receives from its data loaders, with their indices, and which of them were trained on.

Receiving is not training: workers draw ahead, Accelerate fetches one batch ahead and draws batches again to skip them,
and evaluation has loaders too. So a batch counts only when it went through a wrapped model in training, or, without a
wrapper, when it is among the newest in hand at a backward.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from types import ModuleType
from typing import Any, Sequence

from . import digests
from .agent import Agent
from .digests import Batch, View
from .wire import Phase

_RING = 256
_DRAWN = "_torchaos_drawn"
# Loops that fetch the next batch before they hand out the one before: module -> how many are on their way.
_AHEAD = {"accelerate.data_loader": 1}


class Ring:
    """The batches received last."""

    def __init__(self) -> None:
        self._received: deque[Batch] = deque()
        self._fresh: dict[Batch, None] = {}  # those of them that have not been trained on, in order
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

    def match(self, views: Sequence[View]) -> Batch | None:
        """The received batch that these come from: that with which they have most in common. Of several (a mask that is
        the same in all of them says little) it is the oldest that has not been trained on."""
        marks = {view.mark() for view in views}
        for batch in self._fresh:  # as a rule it is the only one; to compare with all takes longer than all the rest
            if marks <= batch.marks:
                return batch
        common = [(len(batch.marks & marks), not batch.used, batch) for batch in self._received]
        best = max(common, key=lambda one: one[:2], default=None)  # the first, hence the oldest, of equals
        return best[2] if best and best[0] else None

    def newest(self, count: int) -> list[Batch]:
        """The newest `count` in hand that have not been trained on; the last one trained on where there are none."""
        in_hand = list(self._received)[: len(self._received) - self._ahead]
        fresh: list[Batch] = []
        for batch in reversed(in_hand):
            if batch.used or len(fresh) == count:
                break
            fresh.insert(0, batch)
        return fresh or ([self._last] if self._last is not None else [])

    def has_fresh(self) -> bool:
        """Whether there is a batch in hand that has not been trained on."""
        place = len(self._received) - self._ahead - 1
        return place >= 0 and not self._received[place].used

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


class LoaderHook:
    """Covers `__next__`, `_next_index` and `_reset` of the loader's iterators."""

    def __init__(self, agent: Agent, ring: Ring) -> None:
        self._agent, self._ring = agent, ring
        self._wrapped = False  # a DDP or FSDP model has been seen: the forward phase is its own
        self._depth = 0
        self._receive = agent.careful("samples")(self._receive_batch)

    def model_is_wrapped(self) -> None:
        self._wrapped = True

    def patch(self, module: ModuleType) -> None:
        """torch.utils.data.dataloader."""
        self._cover(module._BaseDataLoaderIter)

    def patch_stateful(self, module: ModuleType) -> None:
        """torchdata's loader, whose iterators have a `__next__` of their own."""
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
            if not agent.on or self._depth:
                return original(iterator)
            if threading.get_ident() != agent.thread:  # a loop that fetches ahead in a thread of its own
                value = original(iterator)
                self._receive(iterator, value, 0)
                return value
            agent.enter(Phase.DATA)
            self._depth = 1
            try:
                value = original(iterator)
            except StopIteration:
                self._ring.exhausted()
                raise
            finally:
                self._depth = 0
                agent.phases.leave(Phase.DATA)
            self._receive(iterator, value, _ahead(sys._getframe(1)))
            if not self._wrapped:
                agent.phases.loosely(Phase.FORWARD)
                if agent.orders.hot:
                    agent.orders.enter(Phase.FORWARD)
            return value

        return __next__

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
            iterator.__dict__.pop(_DRAWN, None)  # of an epoch that was broken off
            return original(iterator, *args, **kwargs)

        return _reset

    def _receive_batch(self, iterator: Any, value: Any, ahead: int) -> None:
        if "samples" not in self._agent.live:
            return
        drawn = iterator.__dict__.get(_DRAWN)
        index = drawn.popleft() if drawn else None
        if not getattr(iterator, "_in_order", True):
            index = None  # batches come as they are ready
        self._ring.receive(digests.digest(digests.look(value), _indices(index)), ahead)


def _indices(drawn: Any) -> tuple[int, ...] | None:
    """The dataset's indices, where the sampler draws numbers (an IterableDataset draws None)."""
    try:
        return tuple(int(index) for index in (drawn if isinstance(drawn, (list, tuple)) else [drawn]))
    except (TypeError, ValueError):
        return None


def _ahead(caller: Any) -> int:
    return _AHEAD.get(caller.f_globals.get("__name__", ""), 0)
