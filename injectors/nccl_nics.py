"""nccl.nics: NCCL is shown fewer or slower network cards than the machine has."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Count, Evidence, Kind, NcclNetFault, NetKind, Record


@dataclass(frozen=True)
class Nics(NcclNetFault):
    """At most `count` cards, of `mbit` million bits a second each: NCCL plans its rings and trees by what it is shown.
    No card becomes slower by it; `nccl.throttle` does that. NCCL asks when the first communicator is made, so let it
    land in the phase `start` of an attempt."""

    count: Count | None = None
    mbit: Count | None = None

    name = "nccl.nics"
    kind = NetKind.NICS

    def __post_init__(self) -> None:
        if self.count is None and self.mbit is None:
            raise ValueError("give count, mbit, or both")

    def amounts(self) -> tuple[int, int]:
        return self.count or 0, self.mbit or 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        # Nobody but NCCL sees it, and NCCL's question is in the plug-in's own count.
        notes = [note for note in record.of_fault(fault, Kind.NOTE) if note.data.get("hits")]
        hit = {event.rank for event in record.of_fault(fault, Kind.APPLYING)}
        if not hit or hit - {note.rank for note in notes}:
            return None
        return Evidence.of(f"NCCL got {notes[0].data['hits']} answers", *notes)
