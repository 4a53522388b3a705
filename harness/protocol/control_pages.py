"""Memory-mapped pages through which the harness, a rank and the C libraries exchange numbers. Standard library only.

`ControlPage` is the page of one fault, which the harness shares with a rank. `NvtxPage` is the page on which the agent
orders a stall of an NCCL call; the C library injectors/native/nvtx/stall.c reads it.

An NvtxPage is a file of 4096 bytes, `p<pid>.nvtx` in the folder that `ENV_NVTX` names. It has native signed 64-bit
words:

    0 MAGIC  1 CALLS  2 ORDER  3 NTH  4 MIN_BYTES  5 MAX_BYTES  6 LEASE_NS  7 NUMBER  8 MATCHED  9 STALLED
    10 BEGUN_NS  11 ENDED_NS  12 LAST_BYTES; at byte 256 the call's name, at byte 512 the path of the control page

The agent writes which call it selects (the name, NTH, MIN_BYTES and MAX_BYTES; -1: any size), LEASE_NS, NUMBER (the
number of the firing, which the word GO of the control page undoes), and ORDER last. ORDER counts from 1; a new value
makes the order valid. The library writes CALLS (NCCL calls seen), MATCHED (calls that match), STALLED (the last order
that was carried out), BEGUN_NS and ENDED_NS of the stall (CLOCK_MONOTONIC, nanoseconds), and LAST_BYTES, the size of
that call (-1 if not known, because NCCL is older than 2.26)."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import ClassVar, TypeVar

_SHORTEST_S, _LONGEST_S, _SHARE = 0.0002, 0.02, 0.02


def wait_until(is_true: Callable[[], bool], end_s: float) -> bool:
    """Waits until `is_true()` or until `end_s` (CLOCK_MONOTONIC). Returns the last `is_true()`. The interpreter lock is
    free during the wait. The pauses between two checks grow with the wait, up to 20 ms. So the wait ends at most 2 %
    late, and a rank that is held for seconds uses so little CPU that the hang observers do not take it for work."""
    begun = time.monotonic()
    while not is_true():
        now = time.monotonic()
        if now >= end_s:
            return False
        time.sleep(min(end_s - now, _LONGEST_S, max(_SHORTEST_S, _SHARE * (now - begun))))
    return True


class State(IntEnum):
    """The state of a fault in the pacer."""

    IDLE = 0
    HELD = 1
    APPLIED = 2
    RELEASED = 3
    MISSED = 4


class ControlPage:
    """A small memory-mapped file for each fault. It outlives the rank, and each word has one writer.

    The words are little-endian signed 64-bit numbers. The harness writes:

    - ALLOWED: how often the fault may fire in all
    - GO: the number of the firing that may continue after a hold; for a fault that lasts, of the firing to undo
    - ARMED_PID: the process in which the fault may fire; 0: any; CALLED_OFF: none
    - BASE, BASE_ATTEMPT: an attempt, and the number of global steps before its first step

    The rank writes FIRED (how often the fault has fired; a restarted rank reads this, so that the fault does not fire
    again) and STATE. Raises ValueError if an existing file is not a control page."""

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
        """Checks the file, without blocking, before it is opened for writing, because a damaged plan may name any
        file."""
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


Self = TypeVar("Self", bound="NativePage")


class NativePage:
    """A page that the agent shares with a C library: a file of `size` bytes, `p<pid>.<suffix>`, in the folder that the
    environment variable `env` names. It has signed 64-bit words in the byte order of the machine. The agent and the
    library make the file in the same way; the first that needs it makes it. The library writes `magic` into word 0 when
    it is loaded."""

    env: ClassVar[str]
    suffix: ClassVar[str]
    size: ClassVar[int]
    magic: ClassVar[int]

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, self.size)
            self._map = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def of_this_process(cls: type[Self]) -> Self:
        """The page of this process. Raises KeyError if the environment variable is not set, which means that no fault
        of the plan uses such a page."""
        return cls(Path(os.environ[cls.env]) / f"p{os.getpid()}.{cls.suffix}")

    @property
    def loaded(self) -> bool:
        """Whether the C library that shares this page is loaded in this process. NCCL loads it at its first call, or
        when it makes its first communicator."""
        return bool(self._words[0] == self.magic)


ENV_NVTX = "TORCHAOS_NVTX"
SIZE = 4096
_MAGIC = 0x78747663616F7274
_NAME_AT, _NAME_SIZE, _CONTROL_AT, _CONTROL_SIZE = 256, 64, 512, 1024
(MAGIC, CALLS, ORDER, NTH, MIN_BYTES, MAX_BYTES, LEASE_NS, NUMBER, MATCHED, STALLED, BEGUN_NS, ENDED_NS, LAST_BYTES) = (
    range(13)
)


@dataclass(frozen=True)
class NcclCall:
    """Selects an NCCL call: the nth call of that name from now on, with `min_bytes` to `max_bytes` bytes (None: any
    size)."""

    name: str = "ncclAllReduce"
    nth: int = 1
    min_bytes: int | None = None
    max_bytes: int | None = None


class NvtxPage(NativePage):
    """The page on which the agent orders a stall of an NCCL call."""

    env, suffix, size, magic = ENV_NVTX, "nvtx", SIZE, _MAGIC

    def read(self, word: int) -> int:
        return self._words[word]

    def order(self, call: NcclCall, control: str, number: int, lease_s: float) -> None:
        """Stalls `call` until the control page at the path `control` ends the firing `number`, or until `lease_s`
        seconds are over. Raises ValueError if a name or path is too long."""
        self._text(_NAME_AT, _NAME_SIZE, call.name)
        self._text(_CONTROL_AT, _CONTROL_SIZE, control)
        words = self._words
        words[NTH], words[NUMBER], words[LEASE_NS] = call.nth, number, int(lease_s * 1e9)
        words[MIN_BYTES] = -1 if call.min_bytes is None else call.min_bytes
        words[MAX_BYTES] = -1 if call.max_bytes is None else call.max_bytes
        words[MATCHED] = 0
        words[ORDER] = words[STALLED] + 1

    @property
    def held_s(self) -> float | None:
        """For how many seconds the newest stall delayed an NCCL call. None if there was no stall yet, or if it still
        delays the call."""
        begun, ended = self.read(BEGUN_NS), self.read(ENDED_NS)
        return (ended - begun) / 1e9 if self.read(STALLED) == self.read(ORDER) and ended >= begun else None

    def _text(self, at: int, size: int, text: str) -> None:
        raw = text.encode()
        if len(raw) >= size:
            raise ValueError(f"{text} is longer than {size - 1} bytes")
        self._map[at : at + size] = raw.ljust(size, b"\0")
