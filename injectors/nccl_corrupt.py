"""nccl.corrupt: one byte of the data that NCCL sends or receives arrives wrong, without an error."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Evidence, Irreversible, NodeSite, Record, Target
from torchaos.plugin.evidence import seen_by_others, seen_by_twin
from torchaos.plugin.families.ranks import NcclTransferFault, NetKind


@dataclass(frozen=True)
class Corrupt(NcclTransferFault):
    """Flips a bit of one byte of the `nth` matching transfer. `place` is the position of the byte in the transfer, as a
    share (0 to 1) of its length; the seed draws it by default. NCCL's protocols LL and LL128 also carry flags, and the
    job hangs if these are wrong: with `NCCL_PROTO: Simple` the transfers carry only data."""

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
        return Irreversible("the wrong byte was used in computations, which can't be undone; the job has to notice")

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return seen_by_others(record, fault)

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        return seen_by_twin(record, twins, fault)
