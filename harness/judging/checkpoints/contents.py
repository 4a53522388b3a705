"""What lies in checkpoints, from the inventory that was taken after the run, and where two runs differ in it. Pure."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.record.history import saved_as
from torchaos.harness.record.plan import PlannedJob
from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Checkpoint:
    path: str  # below the checkpoint folder
    format: str
    step: int | None  # global: as the run recorded its saving, else as the checkpoint itself says
    saved_s: float | None  # when its saving was begun, where that was seen
    complete: bool  # marked as complete by its format
    loadable: bool
    problem: str | None
    tensors: Mapping[str, str]  # digest by name
    values: Mapping[str, str]
    closed: str = ""  # why nothing of it could be read, where that is no fault of its own
    sketches: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of tensors; see checkpoints/sketch.py
    attempt: int | None = None  # that saved it, where that was seen
    root: str = ""  # the checkpoint folder
    named: str = ""  # likewise, with the placeholder of the run's own folder, as in `values`
    raced: bool = False  # its problem is that memory changed while it was saved, as far as can be told

    @property
    def good(self) -> bool:
        """A file may load with a wrong check sum: torch.load verifies none."""
        return self.complete and self.loadable and not self.problem

    @property
    def at(self) -> str:
        return self.path if self.step is None else f"{self.path} (step {self.step})"


@dataclass(frozen=True)
class Clash:
    """One thing that differs between the checkpoints of two runs at the same step."""

    step: int | None
    path: str
    kind: str  # tensor, value; checkpoint: it is not there, or it is of another step
    name: str
    ours: str | None
    theirs: str | None
    distance: float | None = None  # relative; None: it is of no size


def checkpoints_of(record: Record) -> list[Checkpoint] | None:
    """Oldest first; those of unknown step come before all others. None when no inventory was taken, or it is damaged:
    not of the shape that one has."""
    inventory = record.artifacts.get("inventory")
    if not isinstance(inventory, Mapping):
        return None
    listed = inventory.get("checkpoints")
    if not isinstance(listed, list) or not all(isinstance(raw, Mapping) and "path" in raw for raw in listed):
        return None
    found = [_checkpoint(record, root_of(record), raw) for raw in listed]
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.saved_s or 0.0, one.path))


def root_of(record: Record) -> str:
    """The folder of the checkpoints; empty where that is not known."""
    inventory = record.artifacts.get("inventory")
    return str(inventory.get("root") or "") if isinstance(inventory, Mapping) else ""


def is_below(path: str, root: str) -> bool:
    """Whether a path lies in the folder of the checkpoints; all do where that is not known."""
    path, root = posixpath.normpath(path), posixpath.normpath(root)
    return root in (".", path) or path.startswith(f"{root}/")


def differing(one: Checkpoint, other: Checkpoint) -> list[Clash]:
    """The entries of two checkpoints that are not bitwise the same. In a path, each run has its own folder."""
    found = [
        Clash(
            one.step,
            one.path,
            "tensor",
            name,
            one.tensors.get(name),
            other.tensors.get(name),
            distance(one, other, name),
        )
        for name in dict.fromkeys([*other.tensors, *one.tensors])
        if one.tensors.get(name) != other.tensors.get(name)
    ]
    here, there = _own_folders(one.root, other.root)
    for name in dict.fromkeys([*other.values, *one.values]):
        ours, theirs = one.values.get(name), other.values.get(name)
        if ours != theirs and (ours is None or theirs is None or ours.replace(here, there) != theirs):
            found.append(Clash(one.step, one.path, "value", name, ours, theirs, _far(ours, theirs)))
    return found


def distance(one: Checkpoint, other: Checkpoint, name: str) -> float | None:
    """Between two tensors, relative to the larger one: the norm of their difference, as their sketches estimate it (see
    checkpoints/sketch.py), which do not tell a billionth from nothing. None where that is not known: whole numbers,
    NaN, or no sketch."""
    ours, theirs = one.sketches.get(name, ())[1:], other.sketches.get(name, ())[1:]
    if len(ours) < 2 or len(ours) != len(theirs):
        return None
    (norm, *sums), (other_norm, *other_sums) = ours, theirs
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(sums, other_sums, strict=True)) / len(sums))
    return apart / max(norm, other_norm) if apart else 0.0


def _raced(raw: Mapping[str, object]) -> bool:
    listed = raw.get("problems")
    kinds = {one.get("kind") for one in listed if isinstance(one, Mapping)} if isinstance(listed, list) else set()
    return "raced" in kinds and kinds <= {"raced", "nan", "limit"}


def _closed(raw: Mapping[str, object]) -> str:
    types = raw.get("unread")
    if isinstance(types, list) and types:
        return f"it holds files of the type {', '.join(map(str, types))}, which are not read"
    if raw.get("unopened"):
        return (
            "it can't be read without running the code that its pickle may hold, which is not done; save with "
            "torch.save what torch.load(weights_only=True) takes"
        )
    return ""


def unread_of(record: Record) -> str:
    """The types of files beside the checkpoints that may hold tensors and are not read, in words; or nothing."""
    inventory = record.artifacts.get("inventory")
    types = inventory.get("unread") if isinstance(inventory, Mapping) else None
    return f"files of the type {', '.join(map(str, types))} are there, and are not read" if types else ""


def _far(ours: str | None, theirs: str | None) -> float | None:
    """Likewise between two numbers, of which at least one has a decimal point."""
    try:
        a, b = float(ours or ""), float(theirs or "")
    except ValueError:
        return None
    whole = (ours or "").lstrip("-").isdecimal() and (theirs or "").lstrip("-").isdecimal()
    return None if whole or not (math.isfinite(a) and math.isfinite(b)) else abs(a - b) / max(abs(a), abs(b))


def _own_folders(one: str, other: str) -> tuple[str, str]:
    """What two paths have before the last parts that they share."""
    ours, theirs = one.split("/"), other.split("/")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ("/".join(ours), "/".join(theirs)) if ours and theirs else ("", "")


def _named(job: PlannedJob) -> str:
    """The checkpoint folder as the plan has it, from `{run}` or the root on; empty where it is not known."""
    parts = [job.cwd, job.checkpoints] if job.checkpoints else []
    start = max((n for n, part in enumerate(parts) if part.startswith(("{run}", "/"))), default=0)
    return posixpath.normpath(posixpath.join(*parts[start:])) if parts else ""


def _checkpoint(record: Record, root: str, raw: Mapping[str, object]) -> Checkpoint:
    path = str(raw["path"])
    save = saved_as(posixpath.join(root, path), record.history.saves)
    told = raw.get("step")
    step = save.global_step if save and save.global_step is not None else told if isinstance(told, int) else None
    tensors, values, sketches = raw.get("tensors"), raw.get("values"), raw.get("sketches")
    return Checkpoint(
        path, str(raw.get("format", "")), step, save.begun_s if save else None, bool(raw.get("complete")),
        bool(raw.get("loadable")), str(raw["problem"]) if raw.get("problem") else None,
        tensors if isinstance(tensors, Mapping) else {}, values if isinstance(values, Mapping) else {},
        "" if tensors or values else _closed(raw),
        sketches if isinstance(sketches, Mapping) else {}, save.attempt if save else None, root,
        _named(record.plan.job), _raced(raw),
    )  # fmt: skip
