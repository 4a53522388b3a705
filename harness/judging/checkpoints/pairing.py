"""Which checkpoint of a run is which of its twin, and which has no counterpart. Pure.

Checkpoints of one *family* have names that differ in numbers alone: `step-5` and `step-10`, `ema-step-5.pt` and
`ema-step-10.pt`. `best.pt` is a family of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchaos.harness.judging.checkpoints.contents import Checkpoint
from torchaos.harness.record.history.checkpoints import final_path

_NUMBER = re.compile(r"\d+")
Pair = tuple[Checkpoint, Checkpoint]


def family(path: str) -> str:
    return _NUMBER.sub("#", final_path(path))


def pairs(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """The good checkpoints of one step that both have, in the order of ours: under one path, or else under another one
    that holds much the same, as where a trainer finds its usual name taken."""
    own, other_paths = {one.path for one in ours}, {other.path for other in theirs}
    found = []
    for one in (one for one in ours if one.good):
        same = [other for other in theirs if other.good and other.step == one.step]
        if one.path not in other_paths and one.step is not None:
            free = [other for other in same if other.path not in own]
            same = [other for other in free if 2 * _shared(one, other) > max(_size(one), _size(other))][:1]
        else:
            same = [other for other in same if other.path == one.path]
        found += [(one, other) for other in same]
    return found


def lacking(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The good ones of the twin that the run has not, less those that retention explains: a job that keeps the last
    checkpoints of a family, and made as many newer ones as the twin has in all."""
    own = {one.path: one for one in ours}
    paired = {other.path for _one, other in pairs(ours, theirs)}
    gone = [other for other in theirs if other.good and other.path not in paired and not _there(own.get(other.path))]
    return [other for other in gone if not _removed(other, ours, theirs)]


def moved(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """The good ones under one path that are of another step."""
    there = {other.path: other for other in theirs if other.good}
    return [
        (one, there[one.path]) for one in ours if one.good and one.path in there and there[one.path].step != one.step
    ]


def _there(one: Checkpoint | None) -> bool:
    """A torn one may be superseded by others of its family, if it has any."""
    return one is not None and (one.good or "#" in family(one.path))


def _removed(other: Checkpoint, ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> bool:
    if other.step is None:
        return False
    kept = _steps(other, theirs)
    return len({step for step in _steps(other, ours) if step > other.step}) >= len(kept)


def _steps(like: Checkpoint, found: Sequence[Checkpoint]) -> set[int]:
    kin = family(like.path)
    return {one.step for one in found if one.good and one.step is not None and family(one.path) == kin}


def _size(one: Checkpoint) -> int:
    return len(one.tensors) + len(one.values)


def _shared(one: Checkpoint, other: Checkpoint) -> int:
    return len(one.tensors.keys() & other.tensors.keys()) + len(one.values.keys() & other.values.keys())
