"""What an earlier process of this job has found out about its optimizers, for one that resumes: that they step
unequally often. Without it a step that stood for itself before a restart may be taken for a part of another after it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import wire

_NAME = "uneven-a{attempt}"  # a file beside the plan


class Cycle:
    def __init__(self, attempt: int) -> None:
        self._folder, self._attempt = Path(os.environ[wire.ENV_PLAN]).parent, attempt
        self._noted = False

    def is_uneven(self, optimizers: Sequence[Any]) -> bool:
        """Whether it was found out in an earlier attempt. One that begins afresh is not asked: it has to count as the
        first attempt did, and that knew of nothing when it began."""
        if not self._attempt or not any(one.state for one in optimizers):
            return False
        return any((self._folder / _NAME.format(attempt=number)).exists() for number in range(self._attempt))

    def note(self) -> None:
        """It was found out in this attempt."""
        if not self._noted:
            self._noted = True
            (self._folder / _NAME.format(attempt=self._attempt)).touch(0o600)
