"""The control page: a file through which the harness and a rank exchange numbers about one fault, and the wait for such
a number. Standard library only."""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import Callable

_SHORTEST_S, _LONGEST_S, _SHARE = 0.0002, 0.02, 0.02


def wait_until(is_true: Callable[[], bool], end_s: float) -> bool:
    """Waits until `is_true` or until `end_s` (CLOCK_MONOTONIC), and says whether it is true. The interpreter lock is
    free meanwhile. The pauses between two looks grow with the wait, up to 20 ms: so the wait ends at most 2 % late, and
    a rank that is held for seconds uses no processor that the observers of hangs could take for work."""
    begun = time.monotonic()
    while not is_true():
        now = time.monotonic()
        if now >= end_s:
            return False
        time.sleep(min(end_s - now, _LONGEST_S, max(_SHORTEST_S, _SHARE * (now - begun))))
    return True


class State(IntEnum):
    """The state of an order in the pacer."""

    IDLE = 0
    HELD = 1
    APPLIED = 2
    RELEASED = 3
    MISSED = 4


class ControlPage:
    """A small memory-mapped file per fault. It outlives the rank, and each word has one writer.

    The words are little-endian signed 64-bit numbers. The harness writes:

    - ALLOWED: how often the order may fire in all
    - GO: the number of the firing that may continue after a hold; for a fault that lasts: of the firing to undo
    - ARMED_PID: the process that may fire; 0: any; CALLED_OFF: none
    - BASE, BASE_ATTEMPT: global steps before that attempt's first step

    The rank writes FIRED (how often it has fired: a restarted rank reads it and does not fire again) and STATE. Raises
    ValueError if an existing file is no control page."""

    MAGIC, ALLOWED, GO, ARMED_PID, BASE, BASE_ATTEMPT, FIRED, STATE = range(8)
    SIZE, CALLED_OFF = 64, -1
    _MAGIC = 0x746F726368616F73  # "torchaos"
    MARK = _MAGIC.to_bytes(8, "little")  # the first bytes of a page

    def __init__(self, path: str | Path, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if not create:
            self._look(path)
        fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, self.SIZE)
            if os.fstat(fd).st_size != self.SIZE:
                raise ValueError(f"{path}: a control page has {self.SIZE} bytes")
            self._map = mmap.mmap(fd, self.SIZE)
        finally:
            os.close(fd)
        if create:
            self.write(self.BASE_ATTEMPT, -1)
            self.write(self.MAGIC, self._MAGIC)

    def _look(self, path: str | Path) -> None:
        """Checks the file, without blocking, before it is opened for writing. A damaged plan may name any file."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            head = file.read(self.SIZE + 1)
        if len(head) != self.SIZE or not head.startswith(self.MARK):
            raise ValueError(f"{path}: not a control page, which has {self.SIZE} bytes and a mark of its own")

    def read(self, word: int) -> int:
        return int(struct.unpack_from("<q", self._map, 8 * word)[0])

    def write(self, word: int, value: int) -> None:
        struct.pack_into("<q", self._map, 8 * word, value)

    def close(self) -> None:
        self._map.close()
