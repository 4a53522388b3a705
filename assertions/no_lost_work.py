"""Did every resume continue from the newest complete checkpoint, so that no work was lost needlessly?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import Resumes, beside_replicas, each, without_steps


@dataclass(frozen=True)
class NoLostWork(Assertion):
    """Each attempt continued from the newest complete checkpoint of the earlier attempts, on all ranks. With `steps`,
    it lost at most that many steps: all that is judged of a job whose copies no file holds. A job need not use a
    checkpoint that a fault damaged."""

    name = "no_lost_work"
    harm = Harm.LOST_WORK
    needs = frozenset({Need.STEPS, Need.LOSS, Need.CHECKPOINTS})
    requires = (Need.STEPS,)

    steps: int | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return Resumes(run, self.steps).finding()

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """A replica that comes back takes its state from a replica that continued, so it must lose no step. If no
        replica continued, the job is judged as without replicas."""
        return without_steps(run) or beside_replicas(run) or each(self, run, twins)
