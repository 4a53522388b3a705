"""Damage to checkpoints: what is there, which bytes of it a fault changes, and how that is recorded. Without torch.

A fault is asked for its *edits* while the job stands still: `changes` decides on them, and says how they are taken
back; `apply` carries out those very edits, and writes each into the journal, to the byte.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torchaos.harness.agent.wire import Kind
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.layout import Checkpoint
from torchaos.harness.contracts import ChaosError, Emit, Evidence, Handle, Site
from torchaos.harness.undo.file import File

if TYPE_CHECKING:
    from torchaos.harness.record import Record

SHORT = 64  # bytes: what is longer is recorded by its digest


class Edit(Protocol):
    """One change to one file. `data` is what the journal says of it, before it is carried out."""

    op: ClassVar[str]

    @property
    def path(self) -> Path: ...

    def data(self) -> Mapping[str, Any]: ...

    def __call__(self) -> None: ...


@dataclass(frozen=True)
class Write:
    """Other bytes in the place of those at `offset`; the length stays."""

    op: ClassVar[str] = "write"
    path: Path
    offset: int
    new: bytes
    part: str = ""  # which tensor, or which part of the file, it lies in

    def data(self) -> Mapping[str, Any]:
        old = read(self.path, self.offset, len(self.new))
        return {"offset": self.offset, "length": len(self.new), "part": self.part, **_before_after(old, self.new)}

    def __call__(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset)
            file.write(self.new)


@dataclass(frozen=True)
class Zero:
    """Zeros in the place of what was there."""

    op: ClassVar[str] = "zero"
    path: Path
    offset: int
    length: int

    def data(self) -> Mapping[str, Any]:
        return {"offset": self.offset, "length": self.length, "before": digest(self.path, self.offset, self.length)}

    def __call__(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset)
            for start in range(0, self.length, 1 << 20):
                file.write(bytes(min(1 << 20, self.length - start)))


@dataclass(frozen=True)
class Cut:
    """The file ends at `length` bytes."""

    op: ClassVar[str] = "cut"
    path: Path
    length: int

    def data(self) -> Mapping[str, Any]:
        return {"offset": self.length, "length": self.path.stat().st_size - self.length}

    def __call__(self) -> None:
        os.truncate(self.path, self.length)


@dataclass(frozen=True)
class Swap:
    """The bytes of another file in the place of its own."""

    op: ClassVar[str] = "swap"
    path: Path
    source: Path

    def data(self) -> Mapping[str, Any]:
        return {"source": str(self.source), "before": digest(self.path), "after": digest(self.source)}

    def __call__(self) -> None:
        with open(self.source, "rb") as new, open(self.path, "r+b") as file:
            shutil.copyfileobj(new, file, 1 << 20)
            file.truncate()


@dataclass(frozen=True)
class Text:
    """Another content of a small file, such as a tracker."""

    op: ClassVar[str] = "text"
    path: Path
    new: bytes

    def data(self) -> Mapping[str, Any]:
        return _before_after(self.path.read_bytes(), self.new)

    def __call__(self) -> None:
        with open(self.path, "r+b") as file:
            file.write(self.new)
            file.truncate()


@dataclass(frozen=True)
class Remove:
    """The file is gone."""

    op: ClassVar[str] = "remove"
    path: Path

    def data(self) -> Mapping[str, Any]:
        return {"length": self.path.stat().st_size, "before": digest(self.path)}

    def __call__(self) -> None:
        self.path.unlink()


@dataclass(frozen=True)
class Mode:
    """Other permissions; the contents stay."""

    op: ClassVar[str] = "mode"
    path: Path
    mode: int

    def data(self) -> Mapping[str, Any]:
        return {"before": f"{stat.S_IMODE(self.path.stat().st_mode):04o}", "after": f"{self.mode:04o}"}

    def __call__(self) -> None:
        self.path.chmod(self.mode)


class Damager(Protocol):
    """An injector of damage. `newest`: it hits so many of the newest complete checkpoints."""

    newest: int
    seed: int | None

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        """What it does to one checkpoint; `others` are the complete ones, newest first. Raises ChaosError where there
        is nothing in it that could be hit so."""
        ...


@dataclass(frozen=True)
class Decided:
    """What a fault is about to do, decided once: a save that ends meanwhile changes what is the newest."""

    root: Path
    whole: Sequence[Checkpoint]
    edits: Sequence[tuple[Checkpoint, Edit]]


def decide(injector: Damager, root: Path | None) -> Decided:
    """Raises ChaosError where no checkpoint is there, or none that could be hit so."""
    if root is None:
        raise ChaosError("the scenario does not say where the checkpoints are; write job.checkpoints.path")
    whole = survey(root)
    if not whole:
        raise ChaosError(f"there is no complete checkpoint in {root} yet")
    if len(whole) < injector.newest:
        raise ChaosError(f"{root} has {len(whole)} complete checkpoints, and {injector.newest} were to be damaged")
    draw = random.Random(injector.seed)
    hit = whole[: injector.newest]
    return Decided(root, whole, [(one, edit) for one in hit for edit in injector.edits(one, whole, draw)])


def survey(root: Path) -> list[Checkpoint]:
    """The complete checkpoints under a folder, the newest first. Raises ChaosError where it can't be read."""
    files = Local()
    try:
        found = formats.in_order([formats.read(files, path) for path in formats.find(files, str(root))])
    except OSError as error:
        raise ChaosError(f"{root}: {error.strerror}") from error
    finally:
        files.close()
    return [one for one in reversed(found) if one.complete]


def changes(injector: Damager, site: Site) -> Sequence[Handle]:
    """The files as they are, saved to be put back. The decision is kept for `apply`."""
    decided = decide(injector, site.checkpoints)
    vars(injector)["_decided"] = decided  # no field: it is neither a parameter nor part of the plan
    removed = {edit.path for _one, edit in decided.edits if isinstance(edit, Remove)}
    paths = dict.fromkeys(edit.path for _one, edit in decided.edits)
    return [File.of(path, decided.root, site.undo_copies, yields=True, removes=path in removed) for path in paths]


def apply(injector: Damager, site: Site) -> None:
    decided: Decided = vars(injector)["_decided"]
    there = [{"path": one.path, "step": one.step} for one in decided.whole]
    said = f"{len(there)} complete checkpoints are there, the newest is {Path(decided.whole[0].path).name}"
    site.emit(Kind.EFFECT, {"fault": site.fault, "what": "survey", "effect": said, "checkpoints": there})
    for one, edit in decided.edits:
        told = {"file": str(edit.path), "checkpoint": str(one.path), "step": one.step, "op": edit.op, **edit.data()}
        _as_if_untouched(edit)
        site.emit(Kind.EFFECT, {"fault": site.fault, "what": "damaged", "effect": in_words(told), **told})


def in_words(told: Mapping[str, Any]) -> str:
    """`told`: the data of an event that says what was damaged."""
    path, name = Path(told["file"]), Path(told["checkpoint"])
    where = f" at byte {told['offset']}" if "offset" in told else ""
    part = f" ({told['part']})" if told.get("part") else ""
    done = {"write": "was changed", "zero": "reads as zeros", "cut": "was cut off", "swap": "is another file",
            "remove": "was removed", "text": "was changed", "mode": "may not be read"}  # fmt: skip
    return f"{os.path.relpath(path, name.parent)}{part} {done[told['op']]}{where}"


def _as_if_untouched(edit: Edit) -> None:
    """Times of change stay as they were: damage on disk leaves none, and trainers choose a checkpoint by them."""
    before = {path: path.stat() for path in (edit.path, edit.path.parent)}
    edit()
    for path, found in before.items():
        if path.exists():
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def probes(injector: Damager, site: Site) -> Sequence[StillThere]:
    decided: Decided = vars(injector)["_decided"]
    return [StillThere(site.fault, list(dict.fromkeys(edit.path for _one, edit in decided.edits)))]


def felt(injector: Damager, record: Record, fault: str) -> Evidence | None:
    from torchaos.harness.judging import damage

    return damage.felt(record, fault)


@dataclass
class StillThere:
    """Says when the damage is not there any more: the job moved, removed or replaced the file."""

    fault: str
    paths: Sequence[Path]
    period_s: float = 0.2
    _seen: dict[Path, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = {path: _state(path) for path in self.paths}

    def sample(self, emit: Emit) -> None:
        for path in [path for path, state in self._seen.items() if _state(path) != state]:
            del self._seen[path]
            told = f"the job has moved, removed or replaced {path.parent.name}/{path.name}"
            emit(Kind.EFFECT, {"fault": self.fault, "what": "gone", "effect": told, "file": str(path)})


def _state(path: Path) -> str | None:
    """Changes when the file is changed or replaced; reading it all every time would be dear."""
    try:
        found = path.stat()
    except OSError:
        return None
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_ctime_ns} {found.st_mode}"


def read(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def digest(path: Path, offset: int = 0, length: int | None = None) -> str:
    summary, left = hashlib.sha256(), path.stat().st_size if length is None else length
    with open(path, "rb") as file:
        file.seek(offset)
        while block := file.read(min(left, 1 << 20)):
            summary.update(block)
            left -= len(block)
    return "sha256:" + summary.hexdigest()


def _before_after(old: bytes, new: bytes) -> dict[str, str]:
    def told(data: bytes) -> str:
        return data.hex() if len(data) <= SHORT else "sha256:" + hashlib.sha256(data).hexdigest()

    return {"before": told(old), "after": told(new)}
