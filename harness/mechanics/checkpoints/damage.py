"""Damage to checkpoints: what is there, which bytes of it a fault changes, and how that is recorded. Without torch.

A fault is asked for its *edits* while the job stands still: `changes` decides on them, and says how they are taken
back; `apply` carries out those very edits, and writes each into the journal, to the byte.

The newest complete checkpoint is hit; in the phase `checkpoint_written`, in which a save has written all its files and
has not come back to the job, the very one that is being saved, whatever its name says.
"""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind, Phase
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.layout import Checkpoint, Trouble
from torchaos.harness.contracts import ChaosError, Emit, Evidence, Handle, Hits, NodeSite, Target, Where
from torchaos.harness.mechanics.checkpoints.edits import Edit, Remove, in_words
from torchaos.harness.record.history.checkpoints import final_path
from torchaos.harness.undo.file import File

if TYPE_CHECKING:
    from torchaos.harness.record.record import Record

Self = TypeVar("Self")


@dataclass(frozen=True)
class Decided:
    """What a fault is about to do, decided once: a save that ends meanwhile changes what is the newest."""

    root: Path
    whole: Sequence[Checkpoint]
    edits: Sequence[tuple[Checkpoint, Edit]]


def decide(injector: CheckpointFault, root: Path | None, during_save: bool = False) -> Decided:
    """Raises ChaosError where no checkpoint is there, or none that could be hit so."""
    if root is None:
        raise ChaosError("the scenario does not say where the checkpoints are; write job.checkpoints.path")
    whole = survey(root, during_save)
    if not whole:
        raise ChaosError(f"there is no complete checkpoint in {root} yet")
    if len(whole) < injector.newest:
        raise ChaosError(f"{root} has {len(whole)} complete checkpoints, and {injector.newest} were to be damaged")
    draw = random.Random(injector.seed)
    hit = whole[: injector.newest]
    return Decided(root, whole, [(one, edit) for one in hit for edit in injector.edits(one, whole, draw)])


def survey(root: Path, during_save: bool = False) -> list[Checkpoint]:
    """The complete checkpoints under a folder, the newest first; `during_save`: the one that was written last comes
    before them all, though its name may still say that it is unfinished. Raises ChaosError where that can't be read."""
    files = Local()
    try:
        paths = formats.find(files, str(root))
        read = [formats.read(files, path) for path in paths]
        if during_save:
            read += [one for path in _unfinished(root, paths) if (one := formats.read(files, path)).tensors]
        found = formats.in_order(read)
    except OSError as error:
        raise ChaosError(f"{root}: {error.strerror}") from error
    finally:
        files.close()
    whole = [one for one in reversed(found) if one.complete]
    if not during_save or not found:
        return whole
    last = max(enumerate(found), key=lambda one: (_written_ns(one[1]), _unnamed(one[1]), one[0]))[1]
    if any(one.kind is Trouble.TORN for one in last.problems):
        raise ChaosError(f"{last.path}: what is being saved is not whole yet: {last.problems[0].text}")
    return [last, *(one for one in whole if one is not last)]


def _unfinished(root: Path, known: Sequence[str]) -> list[str]:
    """Single files that are being saved under another name than they will have: `step-30.tmp` is to be `step-30.pt`."""
    listed = (path for path in sorted(root.rglob("*")) if final_path(path.name) != path.name and path.is_file())
    return [str(path) for path in listed if not any(path.is_relative_to(one) for one in known)]


def _unnamed(one: Checkpoint) -> bool:
    """Tells the save that is under way where two were written within one tick of the file system's clock (4 ms)."""
    return final_path(Path(one.path).name) != Path(one.path).name


def _written_ns(one: Checkpoint) -> int:
    return max((os.stat(file.path).st_mtime_ns for file in one.files if os.path.exists(file.path)), default=0)


class CheckpointFault(Fault):
    """Damage to checkpoints. `newest`: it hits so many of the newest complete checkpoints."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset()
    hits: ClassVar[Hits] = "files"
    late: ClassVar[bool] = True  # which checkpoint is the newest shows at the Moment

    newest: int
    seed: int | None  # None until it is drawn

    def edits(self, one: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        """What it does to one checkpoint; `others` are the complete ones, newest first. Raises ChaosError where there
        is nothing in it that could be hit so."""
        raise NotImplementedError

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        drawn = draw.getrandbits(32)
        return replace(self, seed=drawn) if vars(self)["seed"] is None else self  # type: ignore[type-var]

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        """The files as they are, saved to be put back. The decision is kept for `apply`."""
        decided = decide(self, site.checkpoints, site.phase is Phase.CHECKPOINT_WRITTEN)
        vars(self)["_decided"] = decided  # no field: it is neither a parameter nor part of the plan
        removed = {edit.path for _one, edit in decided.edits if isinstance(edit, Remove)}
        paths = dict.fromkeys(edit.path for _one, edit in decided.edits)
        return [File.of(path, decided.root, site.undo_copies, yields=True, removes=path in removed) for path in paths]

    def apply(self, site: NodeSite) -> None:
        decided: Decided = vars(self)["_decided"]
        there = [{"path": one.path, "step": one.step} for one in decided.whole]
        said = f"{len(there)} complete checkpoints are there, the newest is {Path(decided.whole[0].path).name}"
        site.emit(Kind.EFFECT, {"fault": site.fault, "what": "survey", "effect": said, "checkpoints": there})
        for one, edit in decided.edits:
            told = {"file": str(edit.path), "checkpoint": str(one.path), "step": one.step, "op": edit.op, **edit.data()}
            _as_if_untouched(edit)
            site.emit(Kind.EFFECT, {"fault": site.fault, "what": "damaged", "effect": in_words(told), **told})

    def probes(self, site: NodeSite) -> Sequence[StillThere]:
        decided: Decided = vars(self)["_decided"]
        return [StillThere(site.fault, list(dict.fromkeys(edit.path for _one, edit in decided.edits)))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.checkpoints import damage

        return damage.felt(record, fault)


def _as_if_untouched(edit: Edit) -> None:
    """Times of change stay as they were: damage on disk leaves none, and trainers choose a checkpoint by them."""
    before = {path: path.stat() for path in (edit.path, edit.path.parent)}
    edit()
    for path, found in before.items():
        if path.exists():
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@dataclass
class StillThere:
    """Says when the damage is not there any more: the job moved, removed or replaced the file; or where it is now, when
    the job has given what it saved its final name."""

    fault: str
    paths: Sequence[Path]
    period_s: float = 0.2
    _seen: dict[Path, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = {path: _state(path) for path in self.paths}

    def sample(self, emit: Emit) -> None:
        for path in [path for path, state in self._seen.items() if _state(path) != state]:
            final = _finished(path, self._seen.pop(path))
            if final is not None:
                self._seen[final] = _state(final)
                told = f"the job has renamed {path.parent.name}/{path.name} to {final.parent.name}/{final.name}"
                data = {"what": "renamed", "effect": told, "file": str(path), "to": str(final)}
                emit(Kind.EFFECT, {"fault": self.fault, **data})
                continue
            told = f"the job has moved, removed or replaced {path.parent.name}/{path.name}"
            emit(Kind.EFFECT, {"fault": self.fault, "what": "gone", "effect": told, "file": str(path)})


def _state(path: Path) -> str | None:
    """Changes when the file is changed or replaced; reading it all every time would be dear."""
    try:
        found = path.stat()
    except OSError:
        return None
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_ctime_ns} {found.st_mode}"


def _finished(path: Path, state: str | None) -> Path | None:
    """Where a file is whose name, or whose folder's, marked it as unfinished, and does so no more."""
    final = Path(final_path(str(path)))
    if final == path or state is None:
        return None
    near = [final, *map(Path, glob.glob(f"{glob.escape(str(final))}.*"))]
    return next((one for one in near if (_state(one) or "").split()[:3] == state.split()[:3]), None)
