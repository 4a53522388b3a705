"""process.abort: the rank aborts (SIGABRT), as a failed C++ check or NCCL's watchdog does."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import RankSite
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Abort(DeathFault):
    """Calls abort(3): no Python clean-up runs."""

    name = "process.abort"
    where = ("rank",)
    needs = frozenset({"agent"})
    code = -signal.SIGABRT

    def apply(self, site: RankSite) -> None:
        os.abort()

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGABRT)]
