"""The base class of faults that damage checkpoints: decides which bytes are changed, changes them, and records the
change. Does not import torch.

The *edits* of a fault are decided while the job is held. `changes` decides on them, and returns their undo. `apply`
carries out exactly these edits, and records each of them in the journal, byte by byte.

The newest complete checkpoint is hit. In the phase `checkpoint_written` (a save has written all its files, but has not
returned to the job yet), the checkpoint that is being saved is hit, even if it has a temporary name."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.layout import Checkpoint, Trouble
from torchaos.harness.fault_drivers.checkpoint_edits import Edit, Remove, in_words
from torchaos.harness.interfaces import ChaosError, Emit, Evidence, Handle, Hits, NodeSite, Target, Where
from torchaos.harness.protocol.wire import Kind, Phase
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.rollback.file_handles import File

if TYPE_CHECKING:
    from torchaos.harness.record.record import Record

Self = TypeVar("Self")


@dataclass(frozen=True)
class Decided:
    """The edits of a fault. They are decided only once, because a save that ends between two decisions would make
    another checkpoint the newest."""

    root: Path
    whole: Sequence[Checkpoint]
    edits: Sequence[tuple[Checkpoint, Edit]]


def decide(injector: CheckpointFault, root: Path | None, during_save: bool = False) -> Decided:
    """Decides on the edits. Raises ChaosError if there is no checkpoint, or if there are fewer than the fault should
    hit."""
    if root is None:
        raise ChaosError("the scenario does not give the folder of the checkpoints; write job.checkpoints.path")
    whole = survey(root, during_save)
    if not whole:
        raise ChaosError(f"there is no complete checkpoint in {root} yet")
    if len(whole) < injector.newest:
        raise ChaosError(f"{root} has {len(whole)} complete checkpoints, but {injector.newest} should be damaged")
    draw = random.Random(injector.seed)
    hit = whole[: injector.newest]
    edits = [(checkpoint, edit) for checkpoint in hit for edit in injector.edits(checkpoint, whole, draw)]
    return Decided(root, whole, edits)


def carry_out(decided: Decided, fault: str, emit: Callable[[Mapping[str, Any]], object]) -> None:
    """Carries out the edits. `emit`: receives the data of the events that record them."""
    there = [{"path": checkpoint.path, "step": checkpoint.step} for checkpoint in decided.whole]
    effect = f"there are {len(there)} complete checkpoints, the newest is {Path(decided.whole[0].path).name}"
    emit({"fault": fault, "what": "survey", "effect": effect, "checkpoints": there})
    for checkpoint, edit in decided.edits:
        place = {"file": str(edit.path), "checkpoint": str(checkpoint.path), "step": checkpoint.step}
        fields = {**place, "op": edit.op, **edit.data()}
        _keep_times(edit)
        emit({"fault": fault, "what": "damaged", "effect": in_words(fields), **fields})


def survey(root: Path, during_save: bool = False) -> list[Checkpoint]:
    """The complete checkpoints below a folder, the newest first: by step, then by the time at which they were written.
    Those of unknown step come last. `during_save`: the checkpoint that was written last comes first, even if its name
    is temporary. Raises ChaosError if they can't be read."""
    files = Local()
    try:
        paths = formats.find(files, str(root))
        read = [formats.read(files, path) for path in paths]
        if during_save:
            unfinished = [formats.read(files, path) for path in _unfinished(root, paths)]
            read += [checkpoint for checkpoint in unfinished if checkpoint.tensors]
        found = sorted(formats.in_order(read), key=lambda one: (0, _written_ns(one)) if one.step is None else (1, 0))
    except OSError as error:
        raise ChaosError(f"{root}: {error.strerror}") from error
    finally:
        files.close()
    whole = [one for one in reversed(found) if one.complete and one.format != formats.UNKNOWN]
    if not during_save or not found:
        return whole
    last = max(enumerate(found), key=lambda indexed: (_written_ns(indexed[1]), _unnamed(indexed[1]), indexed[0]))[1]
    if any(problem.kind is Trouble.TORN for problem in last.problems):
        raise ChaosError(f"{last.path}: the checkpoint that is being saved is not whole yet: {last.problems[0].text}")
    return [last, *(checkpoint for checkpoint in whole if checkpoint is not last)]


def _unfinished(root: Path, known: Sequence[str]) -> list[str]:
    """The files below `root` that are being saved under a temporary name, such as `step-30.tmp`, which will become
    `step-30.pt`. `known`: folders to leave out."""
    listed = (path for path in sorted(root.rglob("*")) if final_path(path.name) != path.name and path.is_file())
    return [str(path) for path in listed if not any(path.is_relative_to(folder) for folder in known)]


def _unnamed(checkpoint: Checkpoint) -> bool:
    """Whether the name of the checkpoint is temporary. Such a name identifies the current save if two checkpoints were
    written within one tick of the file system's clock (4 ms)."""
    return final_path(Path(checkpoint.path).name) != Path(checkpoint.path).name


def _written_ns(checkpoint: Checkpoint) -> int:
    return max((os.stat(file.path).st_mtime_ns for file in checkpoint.files if os.path.exists(file.path)), default=0)


class CheckpointFault(Fault):
    """Damages the newest complete checkpoints. `newest`: the number of checkpoints to damage."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset()
    hits: ClassVar[Hits] = "files"
    late: ClassVar[bool] = True  # which checkpoint is the newest is known only at the Moment

    newest: int
    seed: int | None  # None until it is drawn

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        """The edits of a checkpoint. `others`: all complete checkpoints, the newest first. Raises ChaosError if there
        is no place to damage."""
        raise NotImplementedError

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        drawn = draw.getrandbits(32)
        return replace(self, seed=drawn) if vars(self)["seed"] is None else self  # type: ignore[type-var]

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        """The handles of the files that will be changed, with saved copies. The edits are kept for `apply`."""
        decided = decide(self, site.checkpoints, site.phase is Phase.CHECKPOINT_WRITTEN)
        vars(self)["_decided"] = decided  # not a field of the dataclass, because it is no parameter
        removed = {edit.path for _checkpoint, edit in decided.edits if isinstance(edit, Remove)}
        paths = dict.fromkeys(edit.path for _checkpoint, edit in decided.edits)
        return [File.of(path, decided.root, site.undo_copies, yields=True, removes=path in removed) for path in paths]

    def apply(self, site: NodeSite) -> None:
        carry_out(vars(self)["_decided"], site.fault, lambda data: site.emit(Kind.EFFECT, data))

    def probes(self, site: NodeSite) -> Sequence[StillThere]:
        decided: Decided = vars(self)["_decided"]
        return [StillThere(site.fault, list(dict.fromkeys(edit.path for _checkpoint, edit in decided.edits)))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.analysis.checkpointing import damage_reaction

        return damage_reaction.felt(record, fault)


def _keep_times(edit: Edit) -> None:
    """Carries out the edit, and puts the file's old times back: real damage does not change times, and trainers read
    them."""
    before = {path: path.stat() for path in (edit.path, edit.path.parent)}
    edit()
    for path, status in before.items():
        if path.exists():
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@dataclass
class StillThere:
    """A probe that reports when the damage ends: the job has moved, removed or replaced the file. If the job has only
    given the save its final name, the probe reports the new path and goes on."""

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
                effect = f"the job has renamed {path.parent.name}/{path.name} to {final.parent.name}/{final.name}"
                data = {"what": "renamed", "effect": effect, "file": str(path), "to": str(final)}
                emit(Kind.EFFECT, {"fault": self.fault, **data})
                continue
            effect = f"the job has moved, removed or replaced {path.parent.name}/{path.name}"
            emit(Kind.EFFECT, {"fault": self.fault, "what": "gone", "effect": effect, "file": str(path)})


def _state(path: Path) -> str | None:
    """A text that changes when the file is changed or replaced. It is made without reading the file, which would be
    costly."""
    try:
        status = path.stat()
    except OSError:
        return None
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_ctime_ns} {status.st_mode}"


def _finished(path: Path, state: str | None) -> Path | None:
    """The present path of a file that had a temporary name, if the job has given the file or its folder the final name.
    None otherwise."""
    final = Path(final_path(str(path)))
    if final == path or state is None:
        return None
    near = [final, *map(Path, glob.glob(f"{glob.escape(str(final))}.*"))]
    return next((path for path in near if (_state(path) or "").split()[:3] == state.split()[:3]), None)
