"""Digests of bytes in memory, chunk by chunk: xxh3 if the job's own Python has the package xxhash, else CRC-32."""

from __future__ import annotations

import ctypes
from typing import Any, Callable
from zlib import crc32

from .helper import Helper


def _xxh3() -> Any:
    try:
        from xxhash import xxh3_64
    except ImportError:
        return None
    return xxh3_64


xxh3_64: Any = _xxh3()
CHUNK = 1 << 20
ALGORITHM = "crc32" if xxh3_64 is None else "xxh3"
ASIDE = 1 << 17  # bytes: less than this is digested in the calling thread, which is quicker than a handover
_PIECE = 1 << 22  # bytes
_WAITING = 4  # pieces of work that may wait for the helper; each holds a tensor, or a copy from another device


class Digester:
    """Digests of a stream of bytes, one for each CHUNK bytes. Feed it with `update`."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._crc, self._left = 0, CHUNK
        self._hash = None if xxh3_64 is None else xxh3_64()

    def update(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + self._left]
            if self._hash is not None:
                self._hash.update(part)
            else:
                self._crc = crc32(part, self._crc)
            at += len(part)
            self._left -= len(part)
            self.size += len(part)
            if not self._left:
                self._end()

    def digests(self) -> str:
        """The hex digests of all chunks, also of the last and shorter chunk, joined to one text."""
        if self._left < CHUNK:
            self._end()
        return "".join(self._done)

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest() if self._hash is not None else f"{self._crc:08x}")
        self._begin()


class Tensors:
    """Digests of the tensors of one save, by name: (bytes, hex digests). Made while the save writes."""

    def __init__(self, helper: Callable[[], Helper]) -> None:
        self._helper = helper
        self.digests: dict[str, tuple[int, str]] = {}
        self.error = ""

    def add(self, name: str, data: Any, size: int) -> None:
        """Digests `size` bytes of `data`: bytes, text, a storage or a tensor on any device. `data` must not change
        until the helper is done."""
        if size < ASIDE:
            self.add_now(name, data, size)
        else:
            helper = self._helper()
            helper.do(lambda: self.add_now(name, data, size))
            helper.lend_a_hand(lambda: helper.waiting() <= _WAITING)

    def add_all(self, tensors: list[tuple[str, Any, int]]) -> None:
        """Digests many (name, data, bytes) entries. The helper gets them in pieces of at least _PIECE bytes."""
        part: list[tuple[str, Any, int]] = []
        total = 0
        for tensor in tensors:
            part.append(tensor)
            total += tensor[2]
            if total >= _PIECE:
                self._add_part(part)
                part, total = [], 0
        self._add_part(part)

    def _add_part(self, part: list[tuple[str, Any, int]]) -> None:
        def work() -> None:
            for name, data, size in part:
                self.add_now(name, data, size)

        if part:
            self._helper().do(work)

    def add_now(self, name: str, data: Any, size: int) -> None:
        try:
            view, _kept = view_of(data, size)
            digester = Digester()
            digester.update(view)
            if size:
                self.digests[name] = (size, digester.digests())
        except Exception as error:
            self.error = f"{name}: {type(error).__name__}: {error}"


def view_of(data: Any, size: int) -> tuple[memoryview, Any]:
    """The first `size` bytes of `data` in host memory, and the object that keeps that memory alive."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return memoryview(data).cast("B")[:size], data
    if data.device.type != "cpu":
        data = data.cpu()
    if hasattr(data, "is_contiguous") and not data.is_contiguous():
        data = data.contiguous()
    if not size:
        return memoryview(b""), data
    return memoryview((ctypes.c_ubyte * size).from_address(data.data_ptr())).cast("B"), data
