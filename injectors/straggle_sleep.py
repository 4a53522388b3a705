"""straggle.sleep: a slow rank, by any factor and without privileges. After each step the rank sleeps, in proportion to
the step's time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, RankSite, Record
from torchaos.plugin.evidence import slower


@dataclass(frozen=True)
class StraggleSleep(Fault):
    """A step of the rank takes `factor` times as long. `for` is the duration."""

    factor: float = 3.0

    name = "straggle.sleep"
    where = ("rank",)
    needs = frozenset({"agent"})
    lasting = True

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ValueError("factor says how many times as long a step takes; it is more than 1")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()  # The fault lasts until its control page is cleared, whose undo is on disk for every fault.

    def apply(self, site: RankSite) -> None:
        since = time.monotonic()

        def sleep() -> None:
            nonlocal since
            site.lease.sleep((self.factor - 1) * (time.monotonic() - since))
            since = time.monotonic()

        site.after_steps(sleep)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault, factor=self.factor)
