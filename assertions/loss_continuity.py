"""Did the loss continue as if nothing had happened?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record, inconclusive
from torchaos.plugin.analysis import (
    SCALE_UNJUDGED,
    absent_replicas,
    are_taken_over,
    as_one_job,
    each,
    losses,
    without_steps,
)


@dataclass(frozen=True)
class LossContinuity(Assertion):
    """Compares losses and learning rates of the final history with the twins', by step and rank. `tolerance` is
    relative (0.001: a thousandth) to the value, or to the run's typical loss if the value is smaller. Without it,
    losses must be bitwise equal, except for rounding after a restart on three ranks or more. If several twins differ
    from each other, the tolerance of each step is learned from them. After a change of world size, the means over the
    ranks are compared."""

    name = "loss_continuity"
    harm = Harm.WRONG_RESULT
    needs = frozenset(
        {Need.STEPS, Need.LOSS, Need.SAMPLES, Need.TWIN}  # samples: other samples give other losses
    )
    requires = (Need.STEPS, Need.LOSS)

    tolerance: float | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return losses(run, twins, self.tolerance)

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """If a replica was absent from a step: judges the replicas as one job whose number of ranks changed, or is
        inconclusive if the others did not take over its samples."""
        if blind := without_steps(run):
            return blind
        gone = absent_replicas(run)
        if gone and are_taken_over(run, twins):
            return self.judge(as_one_job(run), [as_one_job(twin) for twin in twins])
        if gone:
            return inconclusive(
                f"{gone}, on fewer samples than in the twin: from then on neither weights nor losses are the twin's, "
                f"so a difference proves nothing; {SCALE_UNJUDGED}"
            )
        return each(self, run, twins)
