"""Was each sample consumed exactly as without the fault: none skipped, none repeated?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import each, samples, samples_of_absent, without_steps


@dataclass(frozen=True)
class SampleAccounting(Assertion):
    """In each global step, all ranks together consumed exactly the twin's samples; the number of ranks may change. The
    digests of the trained batches decide. The indices decide too if a digest covers several samples or a part of one (a
    packed batch); otherwise they are used only in the reason. `skipped`: for jobs of replicas, at most so many samples
    of absent replicas may be consumed by nobody. Without it, such samples make the finding inconclusive."""

    name = "sample_accounting"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.SAMPLES, Need.TWIN})
    requires = (Need.STEPS, Need.SAMPLES)

    skipped: int | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return samples(run, twins)

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """If a replica was absent from a step, the others must consume its samples, or `skipped` must allow that nobody
        does."""
        found = without_steps(run) or samples_of_absent(run, twins, self.skipped) or each(self, run, twins)
        return found if self.skipped is None else replace(found, bound={"skipped": self.skipped})
