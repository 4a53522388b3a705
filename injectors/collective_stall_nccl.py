"""collective.stall_nccl: one NCCL call of the rank does not begin, and all others wait. `for` is the duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, Kind, NodeSite, RankSite, Record
from torchaos.plugin.evidence import all_waited


@dataclass(frozen=True)
class StallNccl(Fault):
    """Waits before the `nth` call of the NCCL function `call` after the moment of the trigger. Calls by torch, an
    extension or ctypes all count, if their size in bytes is between `min_bytes` and `max_bytes`. A C library, which
    NCCL calls through NVTX, does the waiting."""

    call: str = "ncclAllReduce"
    nth: int = 1
    min_bytes: int | None = None
    max_bytes: int | None = None

    name = "collective.stall_nccl"
    where = ("rank",)
    needs = frozenset({"agent", "nvtx"})
    lasting = True

    def __post_init__(self) -> None:
        if not self.call.startswith("nccl") or self.nth < 1:
            raise ValueError("call is the name of a function of NCCL, such as ncclAllReduce, and nth counts from 1")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()  # the C library reads the fault's control page, whose undo is on disk for every fault

    def apply(self, site: RankSite) -> None:
        site.stall_nccl(self.call, self.nth, self.min_bytes, self.max_bytes)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        held = {(e.attempt, e.rank) for e in record.of_fault(fault, Kind.NOTE)}
        hits = list(record.of_fault(fault, Kind.APPLYING))
        later = record.steps_made.after(min((hit.mono_s for hit in hits), default=0.0))
        went_on = set(zip(later.attempt.tolist(), later.rank.tolist(), strict=True))
        # A rank that dies during the wait reports nothing.
        if any((hit.attempt, hit.rank) in went_on - held for hit in hits):
            return None
        return all_waited(record, fault)
