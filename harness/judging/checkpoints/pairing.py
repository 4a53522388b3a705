"""Finds for each checkpoint of a run the same checkpoint of its twin, and the checkpoints that have no counterpart.

The names of the checkpoints of one *family* differ only in numbers: `step-5` and `step-10`, or `ema-step-5.pt` and
`ema-step-10.pt`. `best.pt` is a family by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchaos.harness.judging.checkpoints.contents import Checkpoint
from torchaos.harness.record.history.checkpoints import final_path

_NUMBER = re.compile(r"\d+")
Pair = tuple[Checkpoint, Checkpoint]


def family(path: str) -> str:
    """The final path with each number replaced by `#`."""
    return _NUMBER.sub("#", final_path(path))


def pairs(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """Pairs of good checkpoints of the same step, in the order of `ours`. The two checkpoints of a pair have the same
    path, or share most of their entries under different paths. A trainer may choose another name if its usual name
    exists already. Or it writes two files in turn, and after a restart the files change places."""
    found = []
    for checkpoint in (checkpoint for checkpoint in ours if checkpoint.good):
        same = [other for other in theirs if other.good and other.step == checkpoint.step]
        exact = [other for other in same if other.path == checkpoint.path]
        found += [(checkpoint, other) for other in exact or _elsewhere(checkpoint, same, ours, theirs)[:1]]
    return found


def _elsewhere(
    checkpoint: Checkpoint, same: Sequence[Checkpoint], ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]
) -> list[Checkpoint]:
    """Checkpoints of `same`, all of the same step as `checkpoint`, that may be its counterpart under another path.
    Either both paths are new to the other side, or both sides have both paths, with other steps."""
    if checkpoint.step is None:
        return []
    own = {each.path: each for each in ours}
    here = checkpoint.path in {other.path for other in theirs}
    free = [other for other in same if (other.path in own) is here and not _has(own, other)]
    return [other for other in free if 2 * _shared(checkpoint, other) > max(_size(checkpoint), _size(other))]


def _has(own: Mapping[str, Checkpoint], other: Checkpoint) -> bool:
    return other.path in own and own[other.path].step == other.step


def lacking(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The good checkpoints of the twin that the run lacks. A checkpoint is left out if the job may have deleted it,
    because it keeps only the newest. Then the run has at least as many newer checkpoints of the family as the twin has
    in all."""
    own = {checkpoint.path: checkpoint for checkpoint in ours}
    paired = {other.path for _one, other in pairs(ours, theirs)}
    gone = [other for other in theirs if other.good and other.path not in paired and not _there(own.get(other.path))]
    return [other for other in gone if not _removed(other, ours, theirs)]


def moved(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """Pairs of good checkpoints that have the same path and different steps, and no counterpart under another path."""
    there = {other.path: other for other in theirs if other.good}
    paired = {checkpoint.path for checkpoint, _other in pairs(ours, theirs)}
    return [
        (checkpoint, there[checkpoint.path])
        for checkpoint in ours
        if checkpoint.good and checkpoint.path in there and checkpoint.path not in paired
        if there[checkpoint.path].step != checkpoint.step
    ]


def _there(checkpoint: Checkpoint | None) -> bool:
    """Whether the run has this checkpoint of the twin: the run's own is good, or newer checkpoints of its family may
    have replaced it."""
    return checkpoint is not None and (checkpoint.good or "#" in family(checkpoint.path))


def _removed(other: Checkpoint, ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> bool:
    if other.step is None:
        return False
    kept = _steps(other, theirs)
    return len({step for step in _steps(other, ours) if step > other.step}) >= len(kept)


def _steps(like: Checkpoint, found: Sequence[Checkpoint]) -> set[int]:
    kin = family(like.path)
    return {
        checkpoint.step
        for checkpoint in found
        if checkpoint.good and checkpoint.step is not None and family(checkpoint.path) == kin
    }


def _size(checkpoint: Checkpoint) -> int:
    return len(checkpoint.tensors) + len(checkpoint.values)


def _shared(checkpoint: Checkpoint, other: Checkpoint) -> int:
    return len(checkpoint.tensors.keys() & other.tensors.keys()) + len(checkpoint.values.keys() & other.values.keys())


def alike(
    ours: Sequence[Checkpoint], twins: Sequence[Sequence[Checkpoint]]
) -> tuple[list[Checkpoint], list[list[Checkpoint]], list[str]]:
    """Both sides without the checkpoints that can't be read, and can't be read in the same way in every twin, and the
    paths of those: no fault made them so. If a part was read, only the problem is left out. Damage that was found
    counts on every side."""
    same = {one.path for one in ours if twins and _obstacle(one) and all(_reads_alike(theirs, one) for theirs in twins)}
    nothing = [one.path for one in ours if one.path in same and not (one.tensors or one.values)]
    kept = [[_cleared(one, same) for one in each if one.path not in nothing] for each in (ours, *twins)]
    return kept[0], kept[1:], nothing


def _reads_alike(theirs: Sequence[Checkpoint], one: Checkpoint) -> bool:
    return any(other.path == one.path and _obstacle(other) == _obstacle(one) for other in theirs)


def _obstacle(checkpoint: Checkpoint) -> str:
    """What keeps it from being read, without the numbers. Empty if it can be read, or if it is damaged for sure."""
    return _NUMBER.sub("#", checkpoint.obstacle)


def _cleared(checkpoint: Checkpoint, same: set[str]) -> Checkpoint:
    return replace(checkpoint, loadable=True, problem=None) if checkpoint.path in same else checkpoint
