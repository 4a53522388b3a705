"""Did every resume begin with the parameters, buffers and optimizer's moments that the job had when it saved them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import each, restored_state


@dataclass(frozen=True)
class StateRestored(Assertion):
    """Each attempt that resumed after step N began with the parameters and the optimizer's moments with which an
    earlier attempt went on after step N, bit for bit; or step N+1 led both attempts to the same state. Frozen
    parameters, buffers, and what optimizers of plain classes keep, are compared by name. The check sums are added up
    over the ranks, so the number of ranks may change. No twin is needed. Inconclusive for parts that are not DTensors,
    as in FSDP1, DeepSpeed and Megatron, unless each rank has exactly the same parts as before."""

    name = "state_restored"
    needs = frozenset({Need.STEPS, Need.LOSS, Need.STATE, Need.CHECKPOINTS})
    requires = (Need.STEPS, Need.STATE)
    harm = Harm.WRONG_RESULT
    judge_replicas = each

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return restored_state(run)
