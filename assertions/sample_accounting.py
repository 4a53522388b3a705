"""Was each sample consumed exactly as without the fault: none skipped, none repeated?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import each, samples, samples_of_absent, without_steps


@dataclass(frozen=True)
class SampleAccounting(Assertion):
    """In each global step, all ranks together consumed exactly the twin's samples; the number of ranks may change. The
    digests of the trained batches decide. The indices decide too if a digest covers several samples or a part of one (a
    packed batch); otherwise they are used only in the reason."""

    name = "sample_accounting"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.SAMPLES, Need.TWIN})
    requires = (Need.STEPS, Need.SAMPLES)

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return samples(run, twins)

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """At best inconclusive if a replica was absent from a step: the loss of its samples may be a defect, or
        intended."""
        return without_steps(run) or samples_of_absent(run, twins) or each(self, run, twins)
