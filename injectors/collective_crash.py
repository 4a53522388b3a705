"""collective.crash: the rank dies inside a collective, after it has begun its own part."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import RankSite
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Crash(DeathFault):
    """Starts the collective in torch, and dies at once, perhaps while data is being sent. `by`: SIGKILL, SIGABRT or
    SIGSEGV."""

    by: Literal["kill", "abort", "segfault"] = "kill"

    name = "collective.crash"
    where = ("rank",)
    needs = frozenset({"agent"})
    phase = "collective"

    def apply(self, site: RankSite) -> None:
        die: dict[str, Callable[[], object]] = {
            "kill": lambda: site.signal(signal.SIGKILL), "abort": os.abort, "segfault": lambda: ctypes.string_at(0),
        }  # fmt: skip
        site.call.after = die[self.by]

    @property
    def code(self) -> int:
        return -{"kill": signal.SIGKILL, "abort": signal.SIGABRT, "segfault": signal.SIGSEGV}[self.by]
