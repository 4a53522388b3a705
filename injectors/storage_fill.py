"""storage.fill: the file system that job.checkpoints.size makes is filled until `left` bytes are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind, Size

if TYPE_CHECKING:
    from torchaos.harness.contracts import Emit, Evidence, Handle, Hits, Probe, Site, Where
    from torchaos.harness.record import Record


@dataclass(frozen=True)
class Fill(Fault):
    """A file of ours takes the room, for every rank, whatever it has open; what the job removes, it can use again."""

    left: Size = 0

    name: ClassVar[str] = "storage.fill"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"mount"})
    hits: ClassVar[Hits] = "files"
    late: ClassVar[bool] = True
    hooks: ClassVar[tuple[str, ...]] = ("checkpoints",)
    own_disk: ClassVar[bool] = True

    def changes(self, site: Site) -> Sequence[Handle]:
        from torchaos.harness.storage import ballast

        return [ballast.way_back(site)]

    def apply(self, site: Site) -> None:
        from torchaos.harness.storage import ballast

        ballast.fill(site, self.left)

    def probes(self, site: Site) -> Sequence[Probe]:
        from torchaos.harness.storage import ballast

        return [_Room(site.fault, ballast.folder_of(site), self.left)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """There was no room, seen from outside, and a save failed that met with it, and with no other fault."""
        from torchaos.harness.contracts import Evidence

        full = next(record.of_fault(fault, Kind.EFFECT), None)
        over = next((event.mono_s for event in record.of_fault(fault, Kind.ROLLED_BACK)), float("inf"))
        others = [one.mono_s for one in record.of_kind(Kind.APPLYING) if one.data["fault"] != fault]
        begun: dict[tuple[object, ...], float] = {}
        for event in record.of_kind(Kind.SAVE_BEGIN, Kind.SAVE_END):
            who = event.attempt, event.rank, event.data["path"]
            if event.kind is Kind.SAVE_BEGIN:
                begun[who] = event.mono_s
                continue
            since, until = begun.get(who, event.mono_s), event.mono_s
            alone = not any(since <= at <= until for at in others)
            if full and alone and not event.data.get("ok") and since < over and until > full.mono_s:
                what = f"{full.data['effect']}, and rank {event.rank} could not save {Path(who[2]).name}"
                return Evidence(what, ((full.source, full.seq), (event.source, event.seq)))
        return None


@dataclass
class _Room:
    """Says once that no more than `left` bytes are free."""

    fault: str
    folder: Path
    left: int
    period_s: float = 0.05
    _told: bool = False

    def sample(self, emit: Emit) -> None:
        from torchaos.harness.storage.own_disk import room

        free, size = room(self.folder)
        if free <= self.left and not self._told:
            self._told = True
            told = f"{free} of the {size} bytes of the checkpoints' file system were free"
            emit(Kind.EFFECT, {"fault": self.fault, "what": "room", "effect": told, "free": free})
