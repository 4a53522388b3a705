"""What a save wrote, chunk by chunk, taken from the bytes in memory: a digest of the file could bless damage.

Where bytes pass through Python on their way to the file (torch.distributed.checkpoint, open files, Lightning), they are
digested as they pass, the whole file of them. Where torch or safetensors write a file by themselves, the tensors
are digested in memory while the save writes them; where they lie in the file, and what lies between them (headers,
directories), is read from the file afterwards, in the background. Digests are made by a helper thread, beside the save;
a save waits for them at its end, because the tensors may change as soon as it is over.

A manifest is a JSON file for each save and rank, in the run directory. For each CHUNK of a span there are 16 hex
digits, xxh3. The CRC-32, from which one flipped bit is found, takes several times as long: it is taken of the file in
the background, of chunks whose xxh3 is that of the memory, and then there are 24. Without the xxhash package there are
8, the CRC-32 of the memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import struct
import threading
import time
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator
from zlib import crc32


def _xxh3() -> Any:
    """The hash, where the job's own Python has the package; else None."""
    try:
        from xxhash import xxh3_64
    except ImportError:
        return None
    return xxh3_64


xxh3_64: Any = _xxh3()
VERSION, CHUNK, FOLDER = 1, 1 << 20, "manifests"
ALGORITHM = "crc32" if xxh3_64 is None else "xxh3"
THREAD = "torchaos"  # what the kernel calls our threads: storage faults spare them, for what they read proves nothing
_ASIDE = 1 << 17  # bytes: fewer are digested at once, which takes less than handing them over
_READ = 1 << 20


class Digester:
    """Digests of a run of bytes, chunk by chunk, as they come."""

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
        """Of all that came, the last and shorter chunk included."""
        if self._left < CHUNK:
            self._end()
        return "".join(self._done)

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest() if self._hash is not None else f"{self._crc:08x}")
        self._begin()


class Helper:
    """A thread that works beside the job's. It lives as long as the process. `most`: what may wait for it at once, such
    as tensors that it then holds; 0: any number. `idle`: it takes what processor time nobody else wants."""

    def __init__(self, most: int = 4, idle: bool = False) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(most)
        self._idle = idle
        threading.Thread(target=self._work, name="torchaos-manifest", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for all that was given to it."""
        if timeout_s is None:
            self._queue.join()
            return
        done = threading.Event()
        self.do(done.set)
        done.wait(timeout_s)

    def waiting(self) -> int:
        return self._queue.qsize()

    def _work(self) -> None:
        _present(self._idle)
        while True:
            work = self._queue.get()
            try:
                work()
            finally:
                del work  # the tensors that it holds
                self._queue.task_done()


def _present(idle: bool) -> None:
    """Give this thread its name, and a low priority, where that can be done."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
        if idle:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux, of one thread
    except (AttributeError, OSError):
        pass


class Tee:
    """An open file that digests what is written to it, the way it is written."""

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
        if len(view) < _ASIDE:
            self._update(view)
            return self._file.write(data)
        digested = threading.Event()

        def work() -> None:
            try:
                self._update(view)
            finally:
                digested.set()

        self._helper().do(work)
        try:
            return self._file.write(data)
        finally:
            digested.wait()  # the memory is the caller's

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
            self.error = f"{type(error).__name__}: {error}"


class Tensors:
    """Digests of what a save writes by itself, by name, made while it does."""

    def __init__(self, helper: Callable[[], Helper]) -> None:
        self._helper = helper
        self.digests: dict[str, tuple[int, str]] = {}
        self.error = ""

    def add(self, name: str, data: Any, size: int) -> None:
        """`data`: bytes, text, a storage or a tensor in any memory. It must not change until the helper is done."""
        if size < _ASIDE:
            self.add_now(name, data, size)
        else:
            self._helper().do(lambda: self.add_now(name, data, size))

    def add_all(self, tensors: list[tuple[str, Any, int]]) -> None:
        for name, data, size in tensors:
            self.add_now(name, data, size)

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
    """The bytes, and what keeps them alive."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return memoryview(data).cast("B")[:size], data
    if data.device.type != "cpu":
        data = data.cpu()
    if hasattr(data, "is_contiguous") and not data.is_contiguous():
        data = data.contiguous()
    return memoryview((ctypes.c_ubyte * size).from_address(data.data_ptr())).cast("B") if size else memoryview(
        b""
    ), data


def spans_of_zip(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Where the records of a torch.save file lie. Raises ValueError where one is not there."""
    found = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            known = digests.get(info.filename.partition("/")[2])
            if known:
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                found.append((info.header_offset + 30 + name_length + extra_length, *known))
    if len(found) != len(digests):
        raise ValueError("a record that was written is not in the file")
    return sorted(found)


def spans_of_safetensors(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Where the tensors of a safetensors file lie. Raises ValueError where one is not there."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return sorted((8 + length + header[name]["data_offsets"][0], *known) for name, known in digests.items())


def rest_of(file: BinaryIO, size: int, spans: list[tuple[int, int, str]]) -> str:
    """The digest of all bytes of a file that are in no span."""
    digester = None if xxh3_64 is None else xxh3_64()
    crc = 0
    for begin, end in gaps(size, [(offset, length) for offset, length, _ in spans]):
        file.seek(begin)
        while begin < end:
            part = file.read(min(_READ, end - begin))
            if not part:
                raise ValueError("it became shorter")
            crc = crc32(part, crc)
            if digester is not None:
                digester.update(part)
            begin += len(part)
    return (digester.hexdigest() if digester is not None else "") + f"{crc:08x}"


def with_crcs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]] | None:
    """The same spans, with a CRC-32 behind each xxh3; None where the file is not what was in memory."""
    found = []
    for offset, length, digests in spans:
        parts = []
        file.seek(offset)
        for number, at in enumerate(range(0, length, CHUNK)):
            data, digest = file.read(min(CHUNK, length - at)), digests[16 * number : 16 * number + 16]
            if xxh3_64(data).hexdigest() != digest:
                return None
            parts.append(f"{digest}{crc32(data):08x}")
        found.append((offset, length, "".join(parts)))
    return found


def gaps(size: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What lies between spans, and before and after them: begin and end."""
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset
        at = max(at, offset + length)
    if at < size:
        yield at, size


class Manifest:
    """What one save of one rank has written so far."""

    def __init__(self, folder: Path, name: str, save: str, attempt: int) -> None:
        self._path, self._save, self._attempt = folder / name, save, attempt
        self._files: list[dict[str, Any]] = []
        self._lost: list[str] = []
        self._lock = threading.Lock()

    def has(self, path: str) -> bool:
        return any(one["path"] == path for one in self._files)

    def add(self, path: str, fd: int, spans: list[tuple[int, int, str]], rest: str) -> None:
        about = os.fstat(fd)
        self._add(path, about, about.st_size, spans, rest)

    def add_whole(self, path: str, about: os.stat_result | None, size: int, digests: str) -> None:
        """`about`: None for a file on something that is no local file system."""
        self._add(path, about, size, [(0, size, digests)], None)

    def _add(self, path: str, about: os.stat_result | None, size: int, spans: Any, rest: str | None) -> None:
        dev, ino = (about.st_dev, about.st_ino) if about else (0, 0)
        entry = {"path": path, "dev": dev, "ino": ino, "size": size, "spans": spans, "rest": rest}
        with self._lock:
            self._files.append(entry)

    def add_crcs(self, path: str, spans: list[tuple[int, int, str]]) -> None:
        with self._lock:
            for entry in self._files:
                if entry["path"] == path:
                    entry.update(spans=spans, algorithm=f"{ALGORITHM}+crc32")

    def lose(self, path: str, why: str) -> None:
        with self._lock:
            self._lost.append(f"{path}: {why}")

    def write(self) -> None:
        """Whole or not at all; a second call replaces what the first one wrote."""
        with self._lock:
            if not (self._files or self._lost):
                return
            raw = {
                "version": VERSION, "save": self._save, "algorithm": ALGORITHM, "chunk": CHUNK, "wall_s": time.time(),
                "files": self._files, "lost": self._lost, "attempt": self._attempt,
            }  # fmt: skip
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{threading.get_ident()}.partial")
            partial.write_text(json.dumps(raw, separators=(",", ":")))
            partial.replace(self._path)
