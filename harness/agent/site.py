"""Where a fault is applied when the process is its own target. Fits contracts.Site."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Mapping

from . import wire

if TYPE_CHECKING:
    from .agent import Agent


class RankSite:
    def __init__(self, agent: Agent, fault: str, step: int | None, phase: wire.Phase | None) -> None:
        self.fault, self.step, self.phase = fault, step, phase
        self.pids = [os.getpid()]
        self._agent = agent

    def signal(self, number: int) -> None:
        os.kill(self.pids[0], number)

    def release(self) -> None:
        """Nothing is held: the rank itself is here."""

    def wait_for_exit(self, timeout_s: float) -> Sequence[int]:
        """A process does not see its own exit."""
        return self.pids

    def emit(self, kind: wire.Kind, data: Mapping[str, Any]) -> wire.Event:
        return self._agent.emit(kind, data)
