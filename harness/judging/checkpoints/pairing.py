"""Finds for each checkpoint of a run the same checkpoint of its twin, and those that have no counterpart.

The names of the checkpoints of one *family* differ only in numbers: `step-5` and `step-10`, `ema-step-5.pt` and
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
    """The final path with each number replaced by `#`."""
    return _NUMBER.sub("#", final_path(path))


def pairs(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """Pairs of good checkpoints of the same step, in the order of `ours`.

    The two have the same path, or, if the twin has no such path, share most of their entries: a trainer may choose
    another name if its usual name exists already."""
    own, other_paths = {checkpoint.path for checkpoint in ours}, {other.path for other in theirs}
    found = []
    for checkpoint in (checkpoint for checkpoint in ours if checkpoint.good):
        same = [other for other in theirs if other.good and other.step == checkpoint.step]
        if checkpoint.path not in other_paths and checkpoint.step is not None:
            free = [other for other in same if other.path not in own]
            same = [other for other in free if 2 * _shared(checkpoint, other) > max(_size(checkpoint), _size(other))][
                :1
            ]
        else:
            same = [other for other in same if other.path == checkpoint.path]
        found += [(checkpoint, other) for other in same]
    return found


def lacking(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The good checkpoints of the twin that the run lacks. A checkpoint is left out if the job may have deleted it
    because it keeps only the newest: then the run has as many newer checkpoints of the family as the twin has in
    all."""
    own = {checkpoint.path: checkpoint for checkpoint in ours}
    paired = {other.path for _one, other in pairs(ours, theirs)}
    gone = [other for other in theirs if other.good and other.path not in paired and not _there(own.get(other.path))]
    return [other for other in gone if not _removed(other, ours, theirs)]


def moved(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """Pairs of good checkpoints that have the same path and different steps."""
    there = {other.path: other for other in theirs if other.good}
    return [
        (checkpoint, there[checkpoint.path])
        for checkpoint in ours
        if checkpoint.good and checkpoint.path in there and there[checkpoint.path].step != checkpoint.step
    ]


def _there(checkpoint: Checkpoint | None) -> bool:
    """Whether the run has this checkpoint: it is good, or its family may have newer checkpoints that replace it."""
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
