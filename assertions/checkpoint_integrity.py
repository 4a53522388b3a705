"""Are the checkpoints whole, and do they have the contents that they would have without the fault?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import Checkpoints


@dataclass(frozen=True)
class CheckpointIntegrity(Assertion):
    """Every checkpoint is complete and loads. The newest is no older than the twin's newest, and every checkpoint of
    the twin is there. The contents equal the twin's at the same step. A torn checkpoint is accepted if it is not marked
    as complete and a later checkpoint is whole. `tolerance` is relative (0.001: a thousandth) and limits the difference
    of each tensor, measured by its norm, and of each number. Without it, only those differences are accepted that
    rounding explains or that twins also have. `ignore` names entries that are not compared; `*` stands for any
    text."""

    name = "checkpoint_integrity"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.CHECKPOINTS, Need.INVENTORY, Need.TWIN})

    tolerance: float | None = None
    ignore: Sequence[str] = ()

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        found = Checkpoints(run, twins)
        return (
            found.damage_refused()
            or found.unread()
            or found.complete()
            or found.hold_parameters()
            or found.match_twin(self.tolerance, self.ignore)
        )
