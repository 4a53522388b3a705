"""Remembers across restarts how the optimizers of this job take turns: whether some optimizers step more often than
others, and which optimizers do not step in each iteration. Without this, a step could count as an iteration before a
restart, and as a part of an iteration after it. And the first iteration after a restart could end with another
optimizer's step than before."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from . import wire

_UNEVEN, _LOOSE = "uneven-a{attempt}", "loose-a{attempt}-r{rank}"  # files beside the plan


class Cycle:
    def __init__(self, attempt: int, rank: int) -> None:
        self._folder, self._attempt, self._rank = Path(os.environ[wire.ENV_PLAN]).parent, attempt, rank
        self._noted = False

    def is_uneven(self, optimizers: Sequence[Any]) -> bool:
        """Whether an earlier attempt found that some optimizers step more often than others. False for a job that
        begins from scratch (its optimizers have no state), because its steps must be counted as in the first
        attempt."""
        return any(file.exists() for file in self._of_earlier(_UNEVEN, optimizers))

    def loose(self, optimizers: Sequence[Any]) -> set[int]:
        """The optimizers that did not step in each iteration of this rank in an earlier attempt, as places in
        `optimizers`. Empty for a job that begins from scratch."""
        files = (file for file in self._of_earlier(_LOOSE, optimizers) if file.exists())
        return {int(place) for file in files for place in file.read_text().split()}

    def note(self) -> None:
        """Records that in this attempt some optimizers step more often than others."""
        if not self._noted:
            self._noted = True
            (self._folder / _UNEVEN.format(attempt=self._attempt)).touch(0o600)

    def note_loose(self, places: Collection[int]) -> None:
        """Records which optimizers do not step in each iteration of this attempt."""
        (self._folder / _LOOSE.format(attempt=self._attempt, rank=self._rank)).write_text(" ".join(map(str, places)))

    def _of_earlier(self, name: str, optimizers: Sequence[Any]) -> list[Path]:
        if not any(optimizer.state for optimizer in optimizers):
            return []
        return [self._folder / name.format(attempt=number, rank=self._rank) for number in range(self._attempt)]
