"""The memory of this process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def uncollected() -> Iterator[None]:
    """Switches garbage collection off during the block, or during the function that it decorates. A long record has a
    million objects that stay alive, and each collection would visit all of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back() -> None:
    """Returns freed memory to the kernel. Otherwise glibc keeps it if it lies between blocks that are in use."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
