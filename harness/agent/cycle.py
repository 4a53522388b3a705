"""Remembers across restarts that the optimizers of this job step unequally often. Without it, a step that counted as an
iteration before a restart could count as a part of one after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import wire

_NAME = "uneven-a{attempt}"  # a file beside the plan, one for each attempt


class Cycle:
    def __init__(self, attempt: int) -> None:
        self._folder, self._attempt = Path(os.environ[wire.ENV_PLAN]).parent, attempt
        self._noted = False

    def is_uneven(self, optimizers: Sequence[Any]) -> bool:
        """Whether an earlier attempt found that the optimizers step unequally often. False for a job that begins afresh
        (its optimizers have no state), because it must count as the first attempt did."""
        if not self._attempt or not any(optimizer.state for optimizer in optimizers):
            return False
        return any((self._folder / _NAME.format(attempt=number)).exists() for number in range(self._attempt))

    def note(self) -> None:
        """Records that this attempt found it."""
        if not self._noted:
            self._noted = True
            (self._folder / _NAME.format(attempt=self._attempt)).touch(0o600)
