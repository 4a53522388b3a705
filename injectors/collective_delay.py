"""collective.delay: the rank starts collectives late: each or every nth, by a fixed or drawn time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.plan import Collectives
from torchaos.harness.agent.quantities import Seconds

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Target, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Delay(Fault):
    """Waits `time`, plus up to `jitter` more (uniform, from the seed), before every `every`th collective; only those of
    the `operation`, process `group` and size (bytes) that are given. `for` says how long the rank stays slow."""

    time: Seconds = 0.1
    jitter: Seconds = 0.0
    every: int = 1
    operation: str | None = None
    group: str | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    seed: int = 0

    name: ClassVar[str] = "collective.delay"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lasting: ClassVar[bool] = True
    phase: ClassVar[str | None] = "collective"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError("every counts collectives, from 1")

    def plan(self, target: Target, draw: random.Random) -> Delay:
        return replace(self, seed=self.seed or draw.getrandbits(48))

    def changes(self, site: Any) -> Sequence[Handle]:
        return ()  # the fault's own control page, which is guarded for every fault, is all that keeps it on

    def apply(self, site: Any) -> None:
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
        from torchaos.harness.judging.proof.waits import slower

        return slower(record, fault, self.time)
