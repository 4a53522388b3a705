"""The files that a twin's job read, as its agents recorded them (agent/reads.py), and whether they have changed since.
If they have, the twin is not used any more."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchaos.harness.agent.reads import FAILED, LISTED, READ, WRITTEN
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.twins.sources import variables_in

_WHOLE = 1 << 26  # bytes; of larger files only size and modification time are compared
_MOST = 1 << 30  # bytes of all files together; of further files only size and modification time are compared
_IGNORED = ("__pycache__",)  # made by every run

Stamp = tuple[int, int]  # size in bytes, modification time in nanoseconds
ABSENT: Stamp = (-1, 0)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a job. `files`: size, modification time and digest, by path. An empty digest: only size and time
    are compared. A digest None: the file changed while the job ran. `folders`: digests of the names in each folder that
    the job listed."""

    made_s: float  # seconds since the epoch, when the twin was started
    files: Mapping[str, tuple[int, int, str | None]]
    folders: Mapping[str, str]
    whole: bool = True  # all reads were recorded
    environment: Mapping[str, str] = field(default_factory=dict)  # digests by name; empty: the variable was not set

    @classmethod
    def of(cls, run: RunDir, made_s: float) -> Inputs:
        """The inputs of the job that has just ended in this run directory, without the files that the job wrote
        itself."""
        entries = [line for path in sorted(run.reads.glob("*")) for line in path.read_bytes().split(b"\0") if line]
        by_letter = {
            letter: {os.fsdecode(line[1:]) for line in entries if line[:1] == letter.encode()}
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
        named = variables_in(Path(path) for path in files if path.endswith(".py"))
        known = {name: _variable(name) for name in sorted(named) if name in os.environ or name.isupper()}
        folders = {path: _names(path) for path in sorted(by_letter[LISTED] - own)}
        return cls(made_s, files, folders, not by_letter[FAILED], known)

    def changed(self) -> str:
        """A clause about the first input that has changed since the twin was made. Empty if no change is known."""
        if not self.whole:
            return "the files that its job read are not known"
        for path, (size, changed_ns, was) in self.files.items():
            if why := self._changed(Path(path), (size, changed_ns), was):
                return f"{path} {why}"
        moved = next((path for path, was in self.folders.items() if _names(path) != was), None)
        if moved:
            return f"{moved} has other files in it"
        other = next((name for name, was in self.environment.items() if _variable(name) != was), None)
        return f"the variable {other} has changed" if other else ""

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
        """Reads what `to_json` wrote. Raises ValueError, KeyError or TypeError if the text is damaged."""
        raw = json.loads(text)
        files = {path: (int(entry[0]), int(entry[1]), entry[2]) for path, entry in raw["files"].items()}
        environment = dict(raw.get("environment", {}))
        return cls(float(raw["made_s"]), files, dict(raw["folders"]), bool(raw["whole"]), environment)


def stamp(path: Path) -> Stamp:
    """Size and modification time of a file. ABSENT if it can't be read."""
    try:
        found = path.stat()
    except OSError:
        return ABSENT
    return found.st_size, found.st_mtime_ns


def digest(path: Path) -> str:
    """A digest of a file's contents; for a large file, its path, size and modification time."""
    try:
        if path.stat().st_size > _WHOLE:
            return str((str(path), *stamp(path)))
        return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    except OSError as error:
        return f"can't be read: {error.strerror}"


def digest_of(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=12).hexdigest()


def _variable(name: str) -> str:
    return digest_of(os.environ[name]) if name in os.environ else ""


def _names(folder: str) -> str:
    try:
        names: Iterable[str] = os.listdir(folder)
    except OSError:
        names = ()
    kept = sorted(name for name in names if name not in _IGNORED)
    return hashlib.blake2b("\0".join(kept).encode(errors="surrogateescape"), digest_size=12).hexdigest()
