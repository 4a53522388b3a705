"""process.kill: the rank dies at once and without warning, as by the OOM killer or on a lost node."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Site
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Kill(DeathFault):
    """Sends SIGKILL to the rank. No handler runs, and no buffer is flushed."""

    name = "process.kill"
    where = ("rank", "node")
    needs = frozenset({"pidfd"})

    def apply(self, site: Site) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]
