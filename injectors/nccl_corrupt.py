"""nccl.corrupt: one byte of what NCCL sends or receives arrives wrong, and nobody is told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Evidence, Irreversible, NcclTransferFault, NetKind, NodeSite, Record, Target


@dataclass(frozen=True)
class Corrupt(NcclTransferFault):
    """A bit of one byte of the `nth` transfer that is meant is flipped, `place` (0 to 1) of the way into it; drawn, if
    it is not given. NCCL's protocols LL and LL128 also carry flags, which the job hangs on if they are wrong:
    `NCCL_PROTO: Simple` carries data alone."""

    place: float | None = None

    name = "nccl.corrupt"
    kind = NetKind.CORRUPT
    lasting = False
    hooks = ("state",)
    family = "numeric"

    def plan(self, target: Target, draw: random.Random) -> Corrupt:
        return self if self.place is not None else replace(self, place=round(draw.random(), 6))

    def amounts(self) -> tuple[int, int]:
        return round(1e6 * (self.place or 0.0)), 0

    def changes(self, site: NodeSite) -> Irreversible:  # type: ignore[override]
        return Irreversible("a byte that was received and computed with can't be taken back; the job has to notice")

    def proof(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.corruption import seen_by_others

        return seen_by_others(record, fault)

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.corruption import seen_by_twin

        return seen_by_twin(record, twins, fault)
