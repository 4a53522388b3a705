"""Asking something dear only now and then: no more than one part in `SHARE` of the time goes into answering."""

from __future__ import annotations

import time

SHARE = 20


class Seldom:
    """`with seldom:` around the answer tells it how long one takes."""

    def __init__(self) -> None:
        self._began_s = self._next_s = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._next_s = now + SHARE * (now - self._began_s)
