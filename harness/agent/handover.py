"""Sees when the training loop takes a batch from a `queue.Queue` that is filled by a thread of the job."""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any

from . import digests
from .agent import Agent
from .ring import Ring


class Handover:
    def __init__(self, agent: Agent, ring: Ring) -> None:
        self._agent, self._ring = agent, ring
        self._taken = agent.careful("samples")(self._take)

    def patch(self) -> None:
        """Patches queue.Queue now, before such a thread exists, because the loop may already be waiting for its first
        batch."""
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
        views = digests.look(item)
        if views:
            self._ring.hand_over(views)
