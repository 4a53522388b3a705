"""Asking something dear only now and then: no more than one part in `SHARE` of a processor goes into answering. On a
machine that is busy it is not asked the more seldom."""

from __future__ import annotations

import time

SHARE = 10


class Seldom:
    """`with seldom:` around the answer tells it how long one takes."""

    def __init__(self) -> None:
        self._spent_s = self._next_s = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def __enter__(self) -> None:
        self._spent_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._next_s = time.monotonic() + SHARE * (time.thread_time() - self._spent_s)
