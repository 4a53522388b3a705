"""Decides which saved files belong to a checkpoint that the job resumes from, and which do not, such as `best.pt`.

The resumes of a run show it. A *family* is all files whose paths differ only in numbers. The job resumes from a family
if an attempt loaded a file of this family before its first step. It could also resume from a family whose checkpoints
hold at least the same entries (tensors and values). If no load was seen, every saved file counts."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.judging.checkpoints.contents import checkpoints_of, is_below, root_of
from torchaos.harness.judging.checkpoints.pairing import family
from torchaos.harness.record.history import History, Save
from torchaos.harness.record.history.checkpoints import checkpoint_of
from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Points:
    """The files that the job resumes from.

    `kinds`: kinds of checkpoints, each a set of families. If it is empty, every saved file counts as a checkpoint that
    the job resumes from. `parts`: families of the names of the files that resumes loaded."""

    kinds: tuple[frozenset[str], ...]
    parts: frozenset[str]

    def has(self, path: str) -> bool:
        return not self.kinds or any(_family(path) in kind for kind in self.kinds)

    def by_kind(self, saves: Sequence[Save]) -> list[list[Save]]:
        """The saves of each kind of checkpoint. Saves of other files are left out."""
        if not self.kinds:
            return [list(saves)]
        return [[save for save in saves if _family(save.path) in kind] for kind in self.kinds]

    def loads(self, name: str) -> bool:
        """Whether a resume loaded a file of this name; numbers in the name are ignored."""
        return family(name) in self.parts


def points_of(run: Record) -> Points:
    root = root_of(run)
    saved = {_family(save.path) for save in run.history.saves if is_below(save.path, root)}
    paths = {path for path in _loaded(run.history) if is_below(path, root) and _family(path) in saved}
    loaded = _of_one_save(run, {_family(path) for path in paths})
    held = _held(run, root)
    least: set[str] = set().union(*(held.get(name, set()) for name in loaded))
    alike = sorted(name for name in saved - loaded if least and held.get(name, set()) >= least)
    kinds = (frozenset(loaded), *(frozenset((name,)) for name in alike)) if loaded else ()
    parts = (path for path in paths if _family(path) in loaded)
    return Points(kinds, frozenset(family(posixpath.basename(path)) for path in parts))


def _of_one_save(run: Record, loaded: set[str]) -> set[str]:
    """The families, of those that resumes loaded, that one save writes: those from which the attempts went on, and
    those that were saved at all their steps, except one at most, which a death may have cut short. The others hold a
    detail, such as the best metric. If it is not known from which file the attempts went on: the families with a
    number, if there are any."""
    main = {_family(attempt.loaded) for attempt in run.history.attempts if attempt.loaded} & loaded
    if not main:
        return {name for name in loaded if "#" in posixpath.basename(name)} or loaded
    at: dict[str, set[int | None]] = defaultdict(set)
    for save in run.history.saves:
        at[_family(save.path)].add(save.global_step)
    due = set().union(*(at[name] for name in main))
    return {name for name in loaded if name in main or len(due - at[name]) <= 1}


def are_copies(run: Record, path: str, other: str) -> bool:
    """Whether the families of two files are copies of each other: at some step both held the same tensors, bit for bit.

    Files of the same family are no copies but parts of one checkpoint: their names differ in the rank, for example."""
    families = {_family(path), _family(other)}
    found: dict[int | None, dict[str, Mapping[str, str]]] = defaultdict(dict)
    for checkpoint in checkpoints_of(run) or []:
        name = _family(posixpath.join(root_of(run), checkpoint.path))
        if name in families and checkpoint.good and checkpoint.tensors:
            found[checkpoint.step][name] = checkpoint.tensors
    tensors = [tuple(held.values()) for held in found.values() if len(held) == 2]
    return any(ours == theirs for ours, theirs in tensors)


def _loaded(history: History) -> Iterable[str]:
    """The paths that attempts loaded, or tried to load, before their first step."""
    first = {attempt.number: history.executions.of_attempt(attempt.number).first_s() for attempt in history.attempts}
    return (load.path for load in history.loads if load.mono_s <= (first.get(load.attempt) or float("inf")))


def are_alternatives(run: Record, path: str, other: str) -> bool:
    """Whether two files are of different families whose checkpoints hold the same entries, so that a job can resume
    from either."""
    held, families = _held(run, root_of(run)), {_family(path), _family(other)}
    names = [held.get(name, set()) for name in families]
    return len(families) == 2 and bool(names[0]) and names[0] == names[1]


def _held(run: Record, root: str) -> dict[str, set[str]]:
    """The names of all entries of each family, without the names of their files. `later` in an inventory: checkpoints
    that are not judged, because they were changed after the part of the run that is."""
    found: dict[str, set[str]] = {}
    inventory = run.artifacts.get("inventory") or {}
    entries = [(each.path, each.tensors, each.values) for each in checkpoints_of(run) or []]
    entries += [(each["path"], each["tensors"], each["values"]) for each in inventory.get("later", ())]
    for path, tensors, values in entries:
        names = {name.rpartition(":")[2] for name in (*tensors, *values)}
        found.setdefault(_family(posixpath.join(root, path)), set()).update(names)
    return found


def _family(path: str) -> str:
    """The family of the checkpoint to which a file belongs, without the file extension, because a save may get its
    extension only with its final name."""
    return posixpath.splitext(family(checkpoint_of(path)))[0]
