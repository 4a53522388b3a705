"""collective.delay: the rank starts collectives late, each or every nth of them, by a fixed or random time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, RankSite, Record, Seconds, Target
from torchaos.plugin.evidence import slower
from torchaos.plugin.families.ranks import Collectives


@dataclass(frozen=True)
class Delay(Fault):
    """Waits `time`, plus up to `jitter` more (uniform, from the seed), before every `every`th collective. `operation`,
    process `group` and size (bytes) limit which collectives count. `for` says how long the rank stays slow."""

    time: Seconds = 0.1
    jitter: Seconds = 0.0
    every: int = 1
    operation: str | None = None
    group: str | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    seed: int = 0

    name = "collective.delay"
    hooks = ("collectives",)
    where = ("rank",)
    needs = frozenset({"agent"})
    lasting = True
    phase = "collective"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError("every counts collectives, from 1")

    def plan(self, target: Target, draw: random.Random) -> Delay:
        return replace(self, seed=self.seed or draw.getrandbits(48))

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()  # The fault lasts until its control page is cleared, whose undo is on disk for every fault.

    def apply(self, site: RankSite) -> None:
        which = Collectives(self.operation, self.group, self.min_bytes, self.max_bytes)
        draw, seen = random.Random(self.seed), 0

        def wait(call: Any) -> None:
            nonlocal seen
            if call.matches(which):
                seen += 1
                if seen % self.every == 0:
                    site.lease.sleep(self.time + self.jitter * draw.random())

        site.at_collectives(wait)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault, self.time)
