"""process.exit: the rank leaves in the middle of its work, with a code of choice."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchaos.plugin import DeathFault, RankSite


@dataclass(frozen=True)
class Exit(DeathFault):
    """_exit(2) with `code`: no clean-up runs. 0 is the nasty one: a supervisor takes it for success."""

    code: int = 1

    name = "process.exit"
    where = ("rank",)
    needs = frozenset({"agent"})

    def apply(self, site: RankSite) -> None:
        os._exit(self.code)
