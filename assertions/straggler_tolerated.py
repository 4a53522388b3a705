"""How much slower than its twin was the job while a rank was slow or delayed?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import Slowness


@dataclass(frozen=True)
class StragglerTolerated(Assertion):
    """While faults were on, steps took on average at most `ratio` times as long as the twin's; steps in which a
    checkpoint was saved are left out. Inconclusive if the twin's own steps vary by more than that. Also inconclusive if
    run and twin differed in speed before the fault, and this difference would change the verdict."""

    name = "straggler_tolerated"
    harm = Harm.SLOW
    needs = frozenset({Need.STEPS, Need.TWIN})

    ratio: float = 1.5

    def __post_init__(self) -> None:
        if self.ratio <= 1:
            raise ValueError("ratio says how many times as long steps may take; it is more than 1")

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return replace(Slowness(self.ratio).finding(run, twins), bound={"ratio": self.ratio})
