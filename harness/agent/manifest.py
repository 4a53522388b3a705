"""The manifest of a save: digests of everything that the save wrote, chunk by chunk.

Digests are made from the bytes in memory, because a digest of the file could already include damage. A manifest is a
JSON file in the run directory, one for each save and rank.

`spans` holds (offset, length, digests) entries, with one digest in hex for each CHUNK bytes:

- 16 digits: xxh3 of the memory.
- 24 digits: xxh3 and then CRC-32, for formats that keep no CRC. A flipped bit can be located from the CRC-32, but it
  takes several times as long as xxh3. So it is computed later, in the background, from the file, and added only if
  every xxh3 of the file is still that of the memory.
- 8 digits: CRC-32 of the memory, if the job's Python has no xxhash package.

A file without spans was saved, but its process ended before the digests were written.

manifest_writer.py decides when manifests are made.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from .digesting_writers import ALGORITHM, CHUNK

VERSION, FOLDER = 1, "manifests"


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
        """Writes that the file was saved, before its digests are known. The process may be killed before they are, and
        then the file must not be taken for that of an earlier save."""
        self._add(path, about, about.st_size, [], None)
        self.write()

    def add(self, path: str, fd: int, spans: list[tuple[int, int, str]], rest: str, raced: bool) -> None:
        """Adds a file of which parts were digested. `rest`: digest of the other bytes. `raced`: right after the save,
        the file already differed from the memory."""
        about = os.fstat(fd)
        self._add(path, about, about.st_size, spans, rest, raced)

    def add_whole(self, path: str, about: os.stat_result | None, spans: list[tuple[int, int, str]]) -> None:
        """Adds a file of which every byte was digested. `about` None: the file is not on a local file system."""
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
                "version": VERSION, "save": self._save, "algorithm": ALGORITHM, "chunk": CHUNK, "wall_s": time.time(),
                "files": self._files, "lost": self._lost, "attempt": self._attempt,
            }  # fmt: skip
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{threading.get_ident()}.partial")
            partial.write_text(json.dumps(raw, separators=(",", ":")))
            partial.replace(self._path)
