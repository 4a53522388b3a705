"""What a save wrote, chunk by chunk, taken from the bytes in memory: a digest of the file could bless damage.

A manifest is a JSON file for each save and rank, in the run directory. For each CHUNK of a span there are 16 hex
digits, xxh3. The CRC-32, from which one flipped bit is found, takes several times as long: it is taken of the file in
the background, of files whose format keeps none and whose every xxh3 is that of the memory, and then there are 24.
Without the xxhash package there are 8, the CRC-32 of the memory. Who makes manifests, and when, is in ledger.py.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from .hashing import ALGORITHM, CHUNK

VERSION, FOLDER = 1, "manifests"


class Manifest:
    """What one save of one rank has written so far."""

    def __init__(self, folder: Path, name: str, save: str, attempt: int) -> None:
        self._path, self._save, self._attempt = folder / name, save, attempt
        self._files: list[dict[str, Any]] = []
        self._lost: list[str] = []
        self._lock = threading.Lock()

    def has(self, path: str) -> bool:
        return any(one["path"] == path for one in self._files)

    def add(self, path: str, fd: int, spans: list[tuple[int, int, str]], rest: str, raced: bool) -> None:
        """`raced`: as soon as it was written, the file was not what was in memory."""
        about = os.fstat(fd)
        self._add(path, about, about.st_size, spans, rest, raced)

    def add_whole(self, path: str, about: os.stat_result | None, spans: list[tuple[int, int, str]]) -> None:
        """`about`: None for a file on something that is no local file system."""
        self._add(path, about, spans[-1][1], spans, None)

    def _add(
        self, path: str, about: os.stat_result | None, size: int, spans: Any, rest: str | None, raced: bool = False
    ) -> None:
        dev, ino = (about.st_dev, about.st_ino) if about else (0, 0)
        entry = {"path": path, "dev": dev, "ino": ino, "size": size, "spans": spans, "rest": rest, "raced": raced}
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
