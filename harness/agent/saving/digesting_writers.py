"""Digests of the bytes of a save (xxh3 if the job's own Python has the package xxhash, else CRC-32), and wrappers for
the files of a save, which digest everything that is written. There is one digest for each CHUNK bytes. Long data is
digested in a background thread (`Helper`), while the job writes it."""

from __future__ import annotations

import ctypes
import io
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from ...protocol.wire import CHUNK, THREAD
from ..job_signals import raise_if_of_the_job


def _xxh3() -> Any:
    try:
        from xxhash import xxh3_64
    except ImportError:
        return None
    return xxh3_64


xxh3_64: Any = _xxh3()
ALGORITHM = "crc32" if xxh3_64 is None else "xxh3"
ASIDE = 1 << 17  # bytes; fewer are digested in the calling thread, because the helper thread would take longer
_PIECE = 1 << 22  # bytes
_WAITING = 4  # pieces of work that may wait for the helper; each holds a tensor, or a copy from another device


class Helper:
    """A background thread that lives as long as the process. It has the priority of all other threads: with a lower
    priority, it could be put off while it holds the interpreter's lock, and the job would wait."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._work, name="torchaos-manifest", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until all work is done, at most `timeout_s` seconds (None: no limit). With a limit, the calling thread
        does its share: the helper thread may have no processor on a busy machine."""
        if timeout_s is None:
            self._queue.join()
            return
        end_s = time.monotonic() + timeout_s
        self.help_out(lambda: time.monotonic() >= end_s)
        work = self._queue
        with work.all_tasks_done:
            work.all_tasks_done.wait_for(lambda: not work.unfinished_tasks, max(0.0, end_s - time.monotonic()))

    def help_out(self, until: Callable[[], bool]) -> None:
        """Does queued work in the calling thread, until `until()` is true or the queue is empty. If all processors are
        busy, this is quicker than to wait for the helper thread."""
        while not until():
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return
            try:
                work()
            finally:
                self._queue.task_done()

    def waiting(self) -> int:
        return self._queue.qsize()

    def _work(self) -> None:
        _present()
        while True:
            work = self._queue.get()
            try:
                work()
            finally:
                del work  # it holds tensors
                self._queue.task_done()


def _present() -> None:
    """Sets this thread's name. Does nothing on systems that don't allow it."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
    except (AttributeError, OSError):
        pass


class Digester:
    """Makes the digests of a stream of bytes, one for each CHUNK bytes. `update` adds bytes."""

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
    """The digests of the tensors of one save: for each name, the number of bytes and the hex digests. They are made
    while the save writes."""

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
            helper.help_out(lambda: helper.waiting() <= _WAITING)

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
            raise_if_of_the_job(error)
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


class Tee:
    """An open file that digests everything that is written to it."""

    def __init__(self, file: Any, helper: Callable[[], Helper]) -> None:
        self._file, self._helper = file, helper
        self.digester, self.error = Digester(), ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        try:
            view = memoryview(data).cast("B")
        except (TypeError, ValueError) as error:
            self.error = str(error)
            return self._file.write(data)
        if len(view) < ASIDE:
            self._update(view)
            return self._file.write(data)
        digested = threading.Event()

        def work() -> None:
            try:
                self._update(view)
            finally:
                digested.set()

        helper = self._helper()
        helper.do(work)
        try:
            return self._file.write(data)
        finally:
            helper.help_out(digested.is_set)
            digested.wait()  # the caller may reuse the memory

    def seek(self, *args: Any) -> Any:
        self.error = "it was not written from its beginning to its end"
        return self._file.seek(*args)

    def truncate(self, *args: Any) -> Any:
        self.error = "it was cut while it was written"
        return self._file.truncate(*args)

    def _update(self, view: memoryview) -> None:
        try:
            self.digester.update(view)
        except Exception as error:
            raise_if_of_the_job(error)
            self.error = f"{type(error).__name__}: {error}"


class WithoutDescriptor(Tee):
    """A Tee that hides its file descriptor. Otherwise torch.save, in the format from before torch 1.6, would write
    tensors directly to the descriptor, and not by `write`."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("all bytes must pass through write()")


class Records:
    """A writer of torch's zip files that also digests each entry."""

    def __init__(self, zip_file: Any, tensors: Tensors) -> None:
        self._zip_file, self._tensors = zip_file, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zip_file, name)

    def write_record(self, name: str, data: Any, size: int) -> Any:
        if size and not isinstance(data, int):  # old versions of torch pass an address
            self._tensors.add(name, data, size)
        elif size:
            self._tensors.error = "torch gave an address only"
        return self._zip_file.write_record(name, data, size)


class Stream:
    """The context in which torch.distributed.checkpoint writes one file, with a Tee around the file."""

    def __init__(
        self, inner: Any, opened: Callable[[Any], Tee | None], closed: Callable[[Tee, os.stat_result | None], None]
    ) -> None:
        self._inner, self._opened, self._closed = inner, opened, closed
        self._tee: Tee | None = None
        self._about: os.stat_result | None = None

    def __enter__(self) -> Any:
        file = self._inner.__enter__()
        self._tee = self._opened(file)
        try:
            self._about = os.fstat(file.fileno())
        except (AttributeError, OSError, ValueError):
            pass  # the file is not on a local file system
        return file if self._tee is None else self._tee

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        result = self._inner.__exit__(kind, error, trace)
        if error is None and self._tee is not None:
            self._closed(self._tee, self._about)
        return result
