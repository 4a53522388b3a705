"""What lies in checkpoints, from the inventory that was taken after the run, and where two runs differ in it. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.history import saved_as
from torchaos.harness.record import Record


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
    closed: bool = False  # nothing of it could be read without running the code that a pickle may hold

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
    kind: str  # tensor, value
    name: str
    ours: str | None
    theirs: str | None


def checkpoints_of(record: Record) -> list[Checkpoint] | None:
    """Oldest first; those of unknown step come before all others. None when no inventory was taken, or it is damaged:
    not of the shape that one has."""
    inventory = record.artifacts.get("inventory")
    if not isinstance(inventory, Mapping):
        return None
    listed = inventory.get("checkpoints")
    if not isinstance(listed, list) or not all(isinstance(raw, Mapping) and "path" in raw for raw in listed):
        return None
    found = [_checkpoint(record, str(inventory.get("root", "")), raw) for raw in listed]
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.saved_s or 0.0, one.path))


def is_below(path: str, root: str) -> bool:
    """Whether a path lies in the folder of the checkpoints; all do where that is not known."""
    path, root = posixpath.normpath(path), posixpath.normpath(root)
    return root in (".", path) or path.startswith(f"{root}/")


def clashes(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint], ignoring: Collection[str] = ()) -> list[Clash]:
    """Where good checkpoints of one step differ: oldest checkpoint first, tensors before values."""
    found = []
    for one in ours:
        other = twin_of(one, theirs)
        if one.good and other is not None:
            found += _clashes(one, other, ignoring)
    return found


def twin_of(one: Checkpoint, theirs: Sequence[Checkpoint]) -> Checkpoint | None:
    same = [other for other in theirs if other.good and other.step == one.step]
    return next((other for other in same if other.path == one.path), same[0] if same and one.step is not None else None)


def _clashes(one: Checkpoint, other: Checkpoint, ignoring: Collection[str]) -> list[Clash]:
    pairs = (("tensor", one.tensors, other.tensors), ("value", one.values, other.values))
    return [
        Clash(one.step, one.path, kind, name, ours.get(name), theirs.get(name))
        for kind, ours, theirs in pairs
        for name in dict.fromkeys([*theirs, *ours])
        if name not in ignoring and ours.get(name) != theirs.get(name)
    ]


def _checkpoint(record: Record, root: str, raw: Mapping[str, object]) -> Checkpoint:
    path = str(raw["path"])
    save = saved_as(posixpath.join(root, path), record.history.saves)
    told = raw.get("step")
    step = save.global_step if save and save.global_step is not None else told if isinstance(told, int) else None
    tensors, values = raw.get("tensors"), raw.get("values")
    return Checkpoint(
        path, str(raw.get("format", "")), step, save.begun_s if save else None, bool(raw.get("complete")),
        bool(raw.get("loadable")), str(raw["problem"]) if raw.get("problem") else None,
        tensors if isinstance(tensors, Mapping) else {}, values if isinstance(values, Mapping) else {},
        bool(raw.get("unopened")) and not tensors and not values,
    )  # fmt: skip
