"""Do the model's parameters equal those without the fault, and are they equal on all ranks that hold replicas?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Outcome, Record, inconclusive
from torchaos.plugin.analysis import (
    SCALE_UNJUDGED,
    Parameters,
    absent_replicas,
    across_replicas,
    are_taken_over,
    as_one_job,
    each,
    without_steps,
)


@dataclass(frozen=True)
class ParameterDigest(Assertion):
    """After each step, the check sum of the parameters is equal on all ranks that hold replicas. At every checkpoint
    and at the end, it equals the twin's. Ranks that have different parameters in the twin too hold parts of the model,
    and are not compared with each other. `replicas_only`: do not compare with the twin's parameters."""

    name = "parameter_digest"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.LOSS, Need.SAMPLES, Need.STATE, Need.CHECKPOINTS, Need.INVENTORY, Need.TWIN})
    requires = (Need.STEPS, Need.STATE)

    replicas_only: bool = False

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return self._bound(Parameters(run, twins).finding(self.replicas_only))

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Ranks of the same number must have equal parameters in all replicas. Ranks of one replica may differ. The
        twin is compared if all replicas took part in every step, or the others took over the samples of one that did
        not."""
        if blind := without_steps(run):
            return blind
        apart = across_replicas(run)
        gone = absent_replicas(run)
        taken_over = gone is not None and are_taken_over(run, twins)
        if apart.outcome is not Outcome.PASSED or self.replicas_only:
            unjudged = apart.outcome is Outcome.PASSED and gone and not taken_over
            return self._bound(replace(apart, reason=f"{apart.reason}; {SCALE_UNJUDGED}") if unjudged else apart)
        if taken_over:
            return self._bound(Parameters(as_one_job(run), [as_one_job(twin) for twin in twins]).finding())
        if gone:
            return inconclusive(
                f"{apart.reason}; {gone}, so that they are not the twin's: `replicas_only: true` compares only the "
                f"replicas; {SCALE_UNJUDGED}"
            )
        finding = each(self, run, twins)
        return replace(finding, reason=f"{apart.reason}; {finding.reason}")

    def _bound(self, finding: Finding) -> Finding:
        return replace(finding, bound={"replicas_only": True} if self.replicas_only else {})
