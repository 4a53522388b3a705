"""Checkpoints that can't be read, and can't be read in the same way in the twin. No fault made them so: they are of a
kind that torchaos does not know, or of its own limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torchaos.harness.judging.checkpoints.contents import Checkpoint

_NUMBER = re.compile(r"\d+")


def alike(
    ours: Sequence[Checkpoint], twins: Sequence[Sequence[Checkpoint]]
) -> tuple[list[Checkpoint], list[list[Checkpoint]], list[str]]:
    """Both sides without the problems that every twin has as well, and the paths of which nothing could be read, which
    are left out of both sides. Damage that was found counts on every side."""
    same = {one.path for one in ours if twins and _key(one) and all(_has(theirs, one) for theirs in twins)}
    nothing = [one.path for one in ours if one.path in same and not (one.tensors or one.values)]
    kept = [[_cleared(one, same) for one in each if one.path not in nothing] for each in (ours, *twins)]
    return kept[0], kept[1:], nothing


def _has(theirs: Sequence[Checkpoint], one: Checkpoint) -> bool:
    return any(other.path == one.path and _key(other) == _key(one) for other in theirs)


def _key(checkpoint: Checkpoint) -> str:
    """What keeps it from being read, without the numbers. Empty if it can be read, or if it is damaged for sure."""
    return _NUMBER.sub("#", checkpoint.obstacle)


def _cleared(checkpoint: Checkpoint, same: set[str]) -> Checkpoint:
    return replace(checkpoint, loadable=True, problem=None) if checkpoint.path in same else checkpoint
