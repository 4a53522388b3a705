"""Makes the manifest of a save in the background: digests, the places of digested tensors in their file (spans), and
digests of the rest of the file.

A save waits only until its tensors are digested, because the job may change them as soon as the save returns, and until
its file is opened for reading, because the job may soon put another file in its place."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from ...protocol.wire import CHUNK, MANIFEST_VERSION, MANIFESTS, gaps
from ..agent import Agent
from .digesting_writers import ALGORITHM, Helper, Tee, Tensors, xxh3_64

_READ = 1 << 20


def spans_of_zip(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """The (offset, bytes, digests) of each record of a torch.save file. Raises ValueError if a record is missing."""
    spans = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            known = digests.get(info.filename.partition("/")[2])
            if known:
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                spans.append((info.header_offset + 30 + name_length + extra_length, *known))
    if len(spans) != len(digests):
        raise ValueError("a record that was written is not in the file")
    return sorted(spans)


def spans_of_safetensors(file: BinaryIO, digests: dict[str, tuple[int, str]]) -> list[tuple[int, int, str]]:
    """The spans of the tensors of a safetensors file. Raises KeyError if a tensor is missing."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return sorted((8 + length + header[name]["data_offsets"][0], *known) for name, known in digests.items())


def rest_of(file: BinaryIO, size: int, spans: list[tuple[int, int, str]]) -> str:
    """The digest of all bytes that are in no span. Raises ValueError if the file is shorter than `size` bytes."""
    digester = None if xxh3_64 is None else xxh3_64()
    crc = 0
    for begin, end in gaps(size, [(offset, length) for offset, length, _ in spans]):
        file.seek(begin)
        while begin < end:
            part = file.read(min(_READ, end - begin))
            if not part:
                raise ValueError("the file became shorter")
            crc = crc32(part, crc)
            if digester is not None:
                digester.update(part)
            begin += len(part)
    return (digester.hexdigest() if digester is not None else "") + f"{crc:08x}"


def with_crcs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]] | None:
    """The spans, with a CRC-32 after each xxh3. None if the file no longer has the digests of the spans."""
    result = []
    for offset, length, digests in spans:
        parts = []
        file.seek(offset)
        for number, at in enumerate(range(0, length, CHUNK)):
            data, digest = file.read(min(CHUNK, length - at)), digests[16 * number : 16 * number + 16]
            if xxh3_64(data).hexdigest() != digest:
                return None
            parts.append(f"{digest}{crc32(data):08x}")
        result.append((offset, length, "".join(parts)))
    return result


def differs(file: BinaryIO, spans: list[tuple[int, int, str]]) -> bool:
    """Whether the file's bytes differ from the memory that was digested for the spans."""
    width = 8 if xxh3_64 is None else 16
    for offset, length, digests in spans:
        file.seek(offset)
        for number, at in enumerate(range(0, length, CHUNK)):
            data = file.read(min(CHUNK, length - at))
            now = f"{crc32(data):08x}" if xxh3_64 is None else xxh3_64(data).hexdigest()
            if now != digests[width * number : width * (number + 1)]:
                return True
    return False


class Manifest:
    """The manifest of one save of one rank."""

    def __init__(self, folder: Path, name: str, save: str, attempt: int) -> None:
        self._path, self._save, self._attempt = folder / name, save, attempt
        self._files: list[dict[str, Any]] = []
        self._lost: list[str] = []
        self._lock = threading.Lock()

    def has(self, path: str) -> bool:
        return any(entry["path"] == path for entry in self._files)

    def announce(self, path: str, about: os.stat_result) -> None:
        """Writes that the file was saved, before its digests are known. If the process is killed meanwhile, an older
        manifest then does not count for this file."""
        self._add(path, about, about.st_size, [], None)
        self.write()

    def add(self, path: str, fd: int, spans: list[tuple[int, int, str]], rest: str, raced: bool) -> None:
        """Adds a file of which some parts were digested. `rest`: the digest of the other bytes. `raced`: right after
        the save, the file already differed from the memory."""
        about = os.fstat(fd)
        self._add(path, about, about.st_size, spans, rest, raced)

    def add_whole(self, path: str, about: os.stat_result | None, spans: list[tuple[int, int, str]]) -> None:
        """Adds a file of which every byte was digested. `about`: None if the file is not on a local file system."""
        self._add(path, about, spans[-1][1], spans, None)

    def _add(
        self, path: str, about: os.stat_result | None, size: int, spans: Any, rest: str | None, raced: bool = False
    ) -> None:
        dev, ino = (about.st_dev, about.st_ino) if about else (0, 0)
        entry = {"path": path, "dev": dev, "ino": ino, "size": size, "spans": spans, "rest": rest, "raced": raced}
        with self._lock:
            self._files = [*(one for one in self._files if one["path"] != path), entry]

    def add_crcs(self, path: str, spans: list[tuple[int, int, str]]) -> None:
        with self._lock:
            for entry in self._files:
                if entry["path"] == path:
                    entry.update(spans=spans, algorithm=f"{ALGORITHM}+crc32")

    def lose(self, path: str, why: str) -> None:
        with self._lock:
            self._lost.append(f"{path}: {why}")

    def write(self) -> None:
        """Writes the JSON file atomically. A second call replaces the file."""
        with self._lock:
            if not (self._files or self._lost):
                return
            raw = {
                "version": MANIFEST_VERSION, "save": self._save, "algorithm": ALGORITHM, "chunk": CHUNK,
                "wall_s": time.time(), "files": self._files, "lost": self._lost, "attempt": self._attempt,
            }  # fmt: skip
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{threading.get_ident()}.partial")
            partial.write_text(json.dumps(raw, separators=(",", ":")))
            partial.replace(self._path)


HOOK = "manifests"
_KEPT = 3  # folders of DCP saves whose newest manifest is remembered
_BEHIND = 16  # files that may wait for their CRCs; no CRCs are made for further files
_PATIENCE_S = 10.0  # seconds to wait for the CRCs at the end of the process
SpansOf = Callable[[BinaryIO, "dict[str, tuple[int, str]]"], "list[tuple[int, int, str]]"]


class ManifestWriter:
    """Makes the manifests of this process, in helper threads."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._folder = Path(agent.plan.events).parent / "agent" / MANIFESTS
        self._number, self._lock = count(), threading.Lock()
        self._helpers: dict[str, Helper] = {}
        self._by_folder: dict[str, Manifest] = {}  # the newest manifest of each folder that DCP saves to

    def digester(self) -> Helper:
        """The thread that makes digests. A save does not end before they are done."""
        return self._helper("digests")

    def wait_for_digests(self) -> None:
        if "digests" in self._helpers:
            self._helpers["digests"].help_out(lambda: False)
            self._helpers["digests"].finish()

    def settle(self) -> None:
        """Waits until the manifests of all saves so far are written, but not for their CRCs."""
        for name in ("digests", "layouts"):
            if name in self._helpers:
                self._helpers[name].finish()

    def ended(self) -> None:
        """Must be called when the process ends. Waits for all manifests, and at most _PATIENCE_S seconds for their
        CRCs."""
        self.settle()
        if "crcs" in self._helpers:
            self._helpers["crcs"].finish(_PATIENCE_S)

    def from_file(self, path: str, tensors: Tensors, spans_of: SpansOf, crcs: bool) -> None:
        """Adds the manifest of a file that a library wrote by itself. `spans_of` finds the place of each tensor in the
        file. The file is opened now, because the job may rename it soon. `crcs`: make CRCs, because the format has
        none."""
        manifest = self._new(path)
        file = None if tensors.error else self._opened(path, manifest)

        def work() -> None:
            try:
                if file is None:
                    raise ValueError(tensors.error)
                if isinstance(file, OSError):
                    raise file
                spans = spans_of(file, tensors.digests)
                rest = rest_of(file, os.fstat(file.fileno()).st_size, spans)
                manifest.add(path, file.fileno(), spans, rest, differs(file, spans))
            except Exception as error:
                manifest.lose(path, f"{type(error).__name__}: {error}")
                manifest.write()
                return
            manifest.write()
            if crcs:
                self._crcs_later(manifest, path, file, spans)
            else:
                file.close()

        self._helper("layouts").do(self._agent.careful(HOOK)(work))

    def whole(self, path: str, save: str, tee: Tee, about: os.stat_result | None, crcs: bool) -> None:
        """Adds a file of which every byte passed through `tee`. `save`: this file, or the folder that is saved."""
        own = self._new(save) if save == path else None
        if own and about and not tee.error:
            own.announce(path, about)

        def work() -> None:
            manifest = own or self._by_folder.get(save)
            if manifest is None or (manifest is not own and manifest.has(path)):
                manifest = self._new(save)
                self._by_folder = {save: manifest, **dict(list(self._by_folder.items())[:_KEPT])}
            digester = tee.digester
            spans = [(0, digester.size, digester.digests())]
            if tee.error:
                manifest.lose(path, tee.error)
            else:
                manifest.add_whole(path, about, spans)
            manifest.write()
            if crcs and about is not None and not tee.error:
                try:
                    self._crcs_later(manifest, path, open(path, "rb"), spans)  # noqa: SIM115 (closed there)
                except OSError:
                    pass  # the file was renamed already: it gets no CRCs

        self._helper("layouts").do(self._agent.careful(HOOK)(work))

    def _helper(self, name: str) -> Helper:
        with self._lock:
            if name not in self._helpers:
                self._helpers[name] = Helper()
            return self._helpers[name]

    def _opened(self, path: str, manifest: Manifest) -> BinaryIO | OSError:
        """Opens the file and announces it. This is done in a thread of the agent, so that a storage fault does not take
        these calls for calls of the job."""
        found: list[BinaryIO | OSError] = []

        def work() -> None:
            try:
                file = open(path, "rb")  # noqa: SIM115 (the reader closes it)
                manifest.announce(path, os.fstat(file.fileno()))
                found.append(file)
            except OSError as error:
                found.append(error)
            finally:
                done.set()

        done = threading.Event()
        self._helper("files").do(work)  # only this thread may do that work
        done.wait()
        return found[0]

    def _crcs_later(self, manifest: Manifest, path: str, file: BinaryIO, spans: list[tuple[int, int, str]]) -> None:
        def work() -> None:
            with file:
                try:
                    found = with_crcs(file, spans)
                except OSError:
                    return
            if found is not None:
                manifest.add_crcs(path, found)
                manifest.write()

        if ALGORITHM == "crc32" or self._helper("crcs").waiting() >= _BEHIND:
            file.close()
        else:
            self._helper("crcs").do(self._agent.careful(HOOK)(work))

    def _new(self, save: str) -> Manifest:
        who = self._agent.who
        name = f"rank{who.rank}-attempt{who.attempt}-{next(self._number)}-{who.pid}.json"
        return Manifest(self._folder, name, save, who.attempt)
