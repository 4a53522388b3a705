"""process.segfault: the rank reads address 0, as a broken extension or driver does."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import RankSite
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Segfault(DeathFault):
    """Reads address 0; the kernel ends the process with SIGSEGV."""

    name = "process.segfault"
    where = ("rank",)
    needs = frozenset({"agent"})
    code = -signal.SIGSEGV

    def apply(self, site: RankSite) -> None:
        ctypes.string_at(0)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGSEGV)]
