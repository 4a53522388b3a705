"""Did the learning rate continue as if nothing had happened?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import each, rates


@dataclass(frozen=True)
class LrContinuity(Assertion):
    """The learning rate of every parameter group equals the twin's, by step and rank. `tolerance` is relative; the
    default is 1e-9. If the twins differ from each other, for example because the schedule follows the loss, the
    tolerance of each step is learned from them."""

    name = "lr_continuity"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.LOSS, Need.TWIN})
    requires = (Need.STEPS,)
    judge_replicas = each

    tolerance: float | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return rates(run, twins, self.tolerance)
