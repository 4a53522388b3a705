"""nccl.nics: NCCL sees fewer or slower network cards than the machine has."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Count, Evidence, Kind, Record
from torchaos.plugin.families.ranks import NcclNetFault, NetKind


@dataclass(frozen=True)
class Nics(NcclNetFault):
    """NCCL sees at most `count` cards of `mbit` million bits per second each, and plans its rings and trees
    accordingly. No card becomes slower; `nccl.throttle` does that. NCCL asks when the first communicator is made, so
    trigger the fault in the phase `start` of an attempt."""

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
        # Only NCCL sees the change, and the plug-in's own count shows that NCCL asked.
        notes = [note for note in record.of_fault(fault, Kind.NOTE) if note.data.get("hits")]
        hit = {event.rank for event in record.of_fault(fault, Kind.APPLYING)}
        if not hit or hit - {note.rank for note in notes}:
            return None
        return Evidence.of(f"NCCL got {notes[0].data['hits']} answers", *notes)
