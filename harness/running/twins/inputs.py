"""What a twin's job read, as its agents recorded it (agent/reads.py), and whether all of it is still as it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torchaos.harness.agent.reads import FAILED, LISTED, READ, WRITTEN
from torchaos.harness.record.rundir import RunDir

_WHOLE = 1 << 26  # bytes; of larger files the size and the time of change must do
_MOST = 1 << 30  # bytes of all files together, likewise
_OURS = ("__pycache__",)  # made by every run

Stamp = tuple[int, int]  # size in bytes, time of change in nanoseconds
ABSENT: Stamp = (-1, 0)


@dataclass(frozen=True)
class Inputs:
    """`files`: size, time of change and digest of each, which is empty where only the first two are compared, and None
    where the file changed while the job ran. `folders`: digests of the names in those that the job listed."""

    made_s: float  # seconds since the epoch, when the twin was started
    files: Mapping[str, tuple[int, int, str | None]]
    folders: Mapping[str, str]
    whole: bool = True  # all that was read was recorded

    @classmethod
    def of(cls, run: RunDir, made_s: float) -> Inputs:
        """What the job of this run directory has just read. What it wrote itself is left out."""
        said = [line for path in sorted(run.reads.glob("*")) for line in path.read_bytes().split(b"\0") if line]
        by_letter = {
            letter: {os.fsdecode(line[1:]) for line in said if line[:1] == letter.encode()}
            for letter in (READ, LISTED, WRITTEN, FAILED)
        }
        written, left = by_letter[WRITTEN], _MOST
        files: dict[str, tuple[int, int, str | None]] = {}
        for path in sorted(by_letter[READ] - written):
            if os.path.isdir(path):
                continue
            size, changed_ns = stamp(Path(path))
            left -= min(max(size, 0), _WHOLE)
            found = digest(Path(path)) if left > 0 and 0 <= size <= _WHOLE else ""
            files[path] = (size, changed_ns, None if changed_ns >= made_s * 1e9 else found)
        own = {os.path.dirname(path) for path in written} | written
        return cls(
            made_s, files, {path: _names(path) for path in sorted(by_letter[LISTED] - own)}, not by_letter[FAILED]
        )

    def changed(self) -> str:
        """What is not as it was, in words; empty where nothing is known to have changed."""
        if not self.whole:
            return "what its job read is not known"
        for path, (size, changed_ns, was) in self.files.items():
            if why := self._changed(Path(path), (size, changed_ns), was):
                return f"{path} {why}"
        moved = next((path for path, was in self.folders.items() if _names(path) != was), None)
        return f"{moved} has other files in it" if moved else ""

    def _changed(self, path: Path, then: Stamp, was: str | None) -> str:
        now = stamp(path)
        if was is None:
            return "was changed while its job ran"
        if now == then and now[1] < self.made_s * 1e9:
            return ""
        if then == ABSENT or now == ABSENT:
            return "" if then == now else "is there now" if then == ABSENT else "is no longer there"
        return "" if was and now[0] == then[0] and digest(path) == was else "has changed"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Inputs:
        """Raises ValueError, KeyError or TypeError where it is damaged."""
        raw = json.loads(text)
        files = {path: (int(one[0]), int(one[1]), one[2]) for path, one in raw["files"].items()}
        return cls(float(raw["made_s"]), files, dict(raw["folders"]), bool(raw["whole"]))


def stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return ABSENT
    return found.st_size, found.st_mtime_ns


def digest(path: Path) -> str:
    """Of the contents, or for a large file of its size and time of change."""
    try:
        if path.stat().st_size > _WHOLE:
            return str((str(path), *stamp(path)))
        return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    except OSError as error:
        return f"can't be read: {error.strerror}"


def _names(folder: str) -> str:
    try:
        names: Iterable[str] = os.listdir(folder)
    except OSError:
        names = ()
    kept = sorted(name for name in names if name not in _OURS)
    return hashlib.blake2b("\0".join(kept).encode(errors="surrogateescape"), digest_size=12).hexdigest()
