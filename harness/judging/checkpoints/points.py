"""Which saved files are of a checkpoint that the job resumes from, and which only lie beside it: `best.pt`, weights for
others to look at. Pure.

A resume shows it: what an attempt loaded before its first step, and what has the same name but for numbers. So is a
family that holds every entry that the loaded one holds: to pass over it is a choice. Where no load was seen, all are.
"""

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
    """`kinds`: of checkpoints to resume from, each a set of families; none: all that is saved. `parts`: families of the
    files that resumes loaded."""

    kinds: tuple[frozenset[str], ...]
    parts: frozenset[str]

    def has(self, path: str) -> bool:
        return not self.kinds or any(_family(path) in kind for kind in self.kinds)

    def by_kind(self, saves: Sequence[Save]) -> list[list[Save]]:
        if not self.kinds:
            return [list(saves)]
        return [[save for save in saves if _family(save.path) in kind] for kind in self.kinds]

    def loads(self, name: str) -> bool:
        """Whether a resume loaded a file of this name, whatever the numbers in it."""
        return family(name) in self.parts


def points_of(run: Record) -> Points:
    root = root_of(run)
    saved = {_family(save.path) for save in run.history.saves if is_below(save.path, root)}
    paths = {path for path in _loaded(run.history) if is_below(path, root) and _family(path) in saved}
    numbered = {path for path in paths if "#" in posixpath.basename(_family(path))}
    paths = numbered or paths  # one under a fixed name beside them was loaded for a part of it, such as the best metric
    loaded = {_family(path) for path in paths}
    held = _held(run, root)
    least: set[str] = set().union(*(held.get(one, set()) for one in loaded))
    alike = sorted(one for one in saved - loaded if least and held.get(one, set()) >= least)
    kinds = (frozenset(loaded), *(frozenset((one,)) for one in alike)) if loaded else ()
    return Points(kinds, frozenset(family(posixpath.basename(path)) for path in paths))


def are_copies(run: Record, one: str, other: str) -> bool:
    """Whether files of these two families are one checkpoint twice: after some step they held the same tensors, bit for
    bit. Files of one family, whose names differ in a number such as that of the rank, are parts."""
    families = {_family(one), _family(other)}
    found: dict[int | None, dict[str, Mapping[str, str]]] = defaultdict(dict)
    for kept in checkpoints_of(run) or []:
        name = _family(posixpath.join(root_of(run), kept.path))
        if name in families and kept.good and kept.tensors:
            found[kept.step][name] = kept.tensors
    both = [tuple(held.values()) for held in found.values() if len(held) == 2]
    return any(ours == theirs for ours, theirs in both)


def _loaded(history: History) -> Iterable[str]:
    """What attempts loaded, or tried to, before their first step. The first attempt resumes from no save of the run."""
    first: dict[int, float] = {}
    for one in history.executions:
        first[one.attempt] = min(one.mono_s, first.get(one.attempt, one.mono_s))
    return (load.path for load in history.loads if load.mono_s <= first.get(load.attempt, float("inf")))


def _held(run: Record, root: str) -> dict[str, set[str]]:
    """The names of all entries of each family, whatever the files that they are in."""
    found: dict[str, set[str]] = {}
    for one in checkpoints_of(run) or []:
        names = {name.rpartition(":")[2] for name in (*one.tensors, *one.values)}
        found.setdefault(_family(posixpath.join(root, one.path)), set()).update(names)
    return found


def _family(path: str) -> str:
    """Without what tells of the type, which a save may get with its final name."""
    return posixpath.splitext(family(checkpoint_of(path)))[0]
