"""When each collective, send and recv of a rank began and ended, in a small memory-mapped file. It can be read from
outside at any time: while the rank hangs or is stopped, and after it has died.

The agent and the harness import this module; standard library only. One writer (the rank's agent), any number of
readers, no locks. The file of a rank is `RUN_DIR/agent/stamps/rank<R>-a<attempt>-p<pid>.stamps`:

    header   8 words: magic, version, rank, attempt, pid, slots, collectives begun so far, start ticks of the pid
    groups   GROUPS entries of 96 bytes, text: name, a blank, the global ranks as "0-3,6" ("?" if they don't fit)
    ring     SLOTS entries of 8 words: number, seq, group and op, bytes, begun, returned, ended, step

Words are native signed 64-bit numbers, each stored by one instruction. Times are nanoseconds of the node's
CLOCK_MONOTONIC; 0 means not yet. `number` counts the collectives of the rank from 1. In each entry it is set to 0 first
and written last, so that a reader sees a complete entry or none. The ring holds the last SLOTS collectives. `group and
op`: the lowest 8 bits are the index of the operation, the next 8 bits the index of the group. The rest is the number of
the thread, if it is a background thread. Sends and recvs from one rank to another have a group of their own, a
`channel`, so that a send and its recv have the same number."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

MAGIC, VERSION = 0x706D617473736F63, 1  # "cosstamp"
GROUPS, _GROUP_SIZE = 64, 96
SLOTS, _WORDS = 128, 8
_HEADER = 64
_RING = _HEADER + GROUPS * _GROUP_SIZE
SIZE = _RING + SLOTS * _WORDS * 8
(_NUMBER, _SEQ, _OP, _BYTES, _BEGUN, _RETURNED, _ENDED, _STEP) = range(_WORDS)

# A stamp holds the index of its operation in this tuple, so only append.
OPS = (
    "other", "all_reduce", "all_gather", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_to_all",
    "barrier", "send", "recv",
)  # fmt: skip
MESSAGES = ("send", "recv")
_CODES = {name: code for code, name in enumerate(OPS)}


@dataclass(frozen=True)
class Stamp:
    """One collective of one rank. Times are seconds of CLOCK_MONOTONIC."""

    rank: int
    attempt: int
    pid: int
    number: int  # counts the rank's collectives from 1
    seq: int  # counts the group's collectives from 1, so the same collective has the same number on all ranks
    op: str
    group: str  # the process group's name
    ranks: tuple[int, ...] | None  # global ranks of the group; None: unknown
    bytes: int  # the larger of input and output on this rank
    step: int  # iterations completed in this attempt
    start_mono_s: float  # when the rank called torch
    returned_mono_s: float | None  # when torch returned (an asynchronous collective is then in progress)
    end_mono_s: float | None  # when it was seen to be over (at most 0.1 s late); None: in progress
    thread: int = 0  # the kernel's number of a background thread; 0: the thread of the training loop

    @property
    def open(self) -> bool:
        return self.end_mono_s is None

    @property
    def pair(self) -> tuple[int, int] | None:
        """The source and the destination of a send or recv. None for a collective, or if they are not known."""
        other = next((rank for rank in self.ranks or () if rank != self.rank), None)
        if self.op not in MESSAGES or other is None:
            return None
        return (self.rank, other) if self.op == "send" else (other, self.rank)

    @property
    def name(self) -> str:
        """The call in words, such as `all_reduce 7 of group 0`."""
        group = self.group.partition(" ")[0]
        between = f" from rank {self.pair[0]} to rank {self.pair[1]}" if self.pair else ""
        return f"{self.op} {self.seq}{between} of group {group}"


def channel(group: str, source: int, target: int) -> str:
    """The name of a channel: the sends and recvs of a process group from one rank to another, which are counted
    together."""
    return f"{group} {source}>{target}"


class Stamps:
    """Writes the stamps of this rank. Calls may come from several threads of one process."""

    def __init__(self, path: str | Path, rank: int, attempt: int, pid: int, start_ticks: int = 0) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, SIZE)
            self._map = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")
        self._numbers = count(1)  # a single C call, so that two threads never get the same number
        self._groups: dict[str, int] = {}
        self._seqs = [count(1) for _ in range(GROUPS)]
        for word, value in enumerate((0, VERSION, rank, attempt, pid, SLOTS, 0, start_ticks)):
            self._words[word] = value
        self._words[0] = MAGIC

    @property
    def begun(self) -> int:
        """How many collectives have begun so far."""
        return self._words[6]

    def known(self, name: str) -> int | None:
        """The code of a process group. None if `group` was not called for it yet."""
        return self._groups.get(name)

    def group(self, name: str, ranks: Iterable[int] | None = None) -> int:
        """The code of a process group, which the first call assigns. If there are more than GROUPS groups, the last
        ones share the last code."""
        code = self._groups.get(name)
        if code is None:
            code = self._groups[name] = min(len(self._groups), GROUPS - 1)
            text = f"{name} {_ranges(sorted(ranks)) if ranks is not None else '?'}".encode()
            if len(text) >= _GROUP_SIZE:
                text = f"{name} ?".encode()[: _GROUP_SIZE - 1]
            at = _HEADER + code * _GROUP_SIZE
            self._map[at : at + len(text)] = text
        return code

    def begin(self, op: str, group: int, size: int, step: int, thread: int = 0) -> int:
        """Records that a collective of `size` bytes begins. `thread`: as in a Stamp. Returns the number of the
        collective, for `returned` and `ended`."""
        number, words = next(self._numbers), self._words
        at = _place(number)
        words[at] = 0
        words[at + _SEQ] = next(self._seqs[group])
        words[at + _OP] = thread << 16 | group << 8 | _CODES.get(op, 0)
        words[at + _BYTES] = size
        words[at + _STEP] = step
        words[at + _RETURNED] = words[at + _ENDED] = 0
        words[at + _BEGUN] = time.monotonic_ns()
        words[at] = number
        words[6] = number
        return number

    def returned(self, number: int) -> None:
        self._stamp(number, _RETURNED)

    def ended(self, number: int) -> None:
        self._stamp(number, _ENDED)

    def _stamp(self, number: int, word: int) -> None:
        at = _place(number)
        if self._words[at] == number:  # otherwise a later collective has taken the entry
            self._words[at + word] = time.monotonic_ns()

    def close(self) -> None:
        self._words.release()
        self._map.close()


def read_stamps(path: str | Path) -> list[Stamp]:
    """The last collectives of one rank process, in the order in which they began. Raises ValueError if the file is not
    a file of stamps or not complete yet, OSError if it can't be read."""
    raw, again = Path(path).read_bytes(), Path(path).read_bytes()
    if not len(raw) == len(again) == SIZE:
        raise ValueError(f"{path}: a file of stamps has {SIZE} bytes")
    magic, version, rank, attempt, pid, *_ = struct.unpack_from("8q", raw)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"{path}: not a file of stamps of version {VERSION}")
    groups = [_read_group(raw, code) for code in range(GROUPS)]
    found = []
    for slot in range(SLOTS):
        at = _RING + slot * _WORDS * 8
        number, seq, op, size, begun, returned, ended, step = struct.unpack_from("8q", raw, at)
        whole = raw[at : at + 8] == again[at : at + 8]  # unchanged while it was read
        if whole and number > 0 and _place(number) * 8 == at and op >> 8 & 0xFF < GROUPS:
            name, ranks = groups[op >> 8 & 0xFF]
            kind = OPS[op & 0xFF] if op & 0xFF < len(OPS) else OPS[0]
            times = (begun / 1e9, returned / 1e9 or None, ended / 1e9 or None)
            found.append(Stamp(rank, attempt, pid, number, seq, kind, name, ranks, size, step, *times, op >> 16))
    return sorted(found, key=lambda stamp: stamp.number)


def read_folder(folder: str | Path) -> list[list[Stamp]]:
    """The stamps of each rank process in `RUN_DIR/agent/stamps`. Skips files that are not complete yet."""
    found = []
    for path in sorted(Path(folder).glob("*.stamps")):
        try:
            found.append(read_stamps(path))
        except (OSError, ValueError):
            continue
    return found


def _place(number: int) -> int:
    """The index of the first word of a collective's entry."""
    return (_RING >> 3) + (number - 1) % SLOTS * _WORDS


def _read_group(raw: bytes, code: int) -> tuple[str, tuple[int, ...] | None]:
    at = _HEADER + code * _GROUP_SIZE
    name, _, ranks = raw[at : at + _GROUP_SIZE].split(b"\0")[0].decode(errors="replace").rpartition(" ")
    try:
        return name, ranks_in(ranks)
    except ValueError:
        return name, None


def _ranges(ranks: Sequence[int]) -> str:
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in ranges_of(ranks))


def ranges_of(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last number of each range of consecutive numbers, in the given order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def ranks_in(text: str) -> tuple[int, ...]:
    """The ranks in a text such as `0-3,6`. Raises ValueError for any other text."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)
