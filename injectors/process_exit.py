"""process.exit: the rank exits in the middle of its work, with a chosen exit code."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchaos.plugin import RankSite
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Exit(DeathFault):
    """Calls _exit(2) with `code`: no clean-up runs. The most dangerous code is 0, because a supervisor then believes
    that the rank succeeded."""

    code: int = 1

    name = "process.exit"
    where = ("rank",)
    needs = frozenset({"agent"})

    def apply(self, site: RankSite) -> None:
        os._exit(self.code)
