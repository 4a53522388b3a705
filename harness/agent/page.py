"""The control page: how the harness and a rank speak of one fault. Standard library alone, as `wire`."""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path


class State(IntEnum):
    """Where the pacer is with an order."""

    IDLE = 0
    HELD = 1
    APPLIED = 2
    RELEASED = 3
    MISSED = 4


class ControlPage:
    """A small memory-mapped file per fault; it outlives the rank, and each word has one writer.

    Little-endian signed 64-bit words. The harness writes ALLOWED (how often the order may fire in all), GO (the number
    of the firing that may go on after a hold, or that is taken back where the fault lasts), ARMED_PID (the one process
    that may fire; 0: any; CALLED_OFF: none ever will), BASE and BASE_ATTEMPT (global steps done before that attempt's
    first step). The rank writes FIRED (how often it has fired: a restarted rank reads it and does not fire again) and
    STATE.
    """

    MAGIC, ALLOWED, GO, ARMED_PID, BASE, BASE_ATTEMPT, FIRED, STATE = range(8)
    SIZE, CALLED_OFF = 64, -1
    _MAGIC = 0x746F726368616F73  # "torchaos"
    MARK = _MAGIC.to_bytes(8, "little")  # what a page begins with

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
        """Before it is opened to write, and without waiting for a fifo's writer: a damaged plan may name anything."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = file.read(self.SIZE + 1)
        if len(found) != self.SIZE or not found.startswith(self.MARK):
            raise ValueError(f"{path}: not a control page, which has {self.SIZE} bytes and a mark of its own")

    def read(self, word: int) -> int:
        return int(struct.unpack_from("<q", self._map, 8 * word)[0])

    def write(self, word: int, value: int) -> None:
        struct.pack_into("<q", self._map, 8 * word, value)

    def close(self) -> None:
        self._map.close()
