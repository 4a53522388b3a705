"""Was silent corruption found, by whom, after how many steps, and did bad state reach a checkpoint?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import Corruption


@dataclass(frozen=True)
class SdcDetected(Assertion):
    """The corruption was found in at most `within` steps, and no checkpoint holds bad state. `by`: who may find it:
    only the job, or also checks that torchaos makes but that a job could make itself (digests of replicas, gradient
    norm, loss)."""

    within: int = 10
    by: Literal["anybody", "job"] = "anybody"

    name = "sdc_detected"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.LOSS, Need.STATE, Need.CHECKPOINTS, Need.INVENTORY, Need.TWIN})

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return Corruption(self.within, self.by).finding(run, twins)
