"""nccl.stall, .flap, .delay and .throttle: the data that NCCL sends or receives stops, is late or is slow."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Evidence, Positive, Record, Seconds
from torchaos.plugin.evidence import slower
from torchaos.plugin.families.ranks import NcclTransferFault, NetKind


@dataclass(frozen=True)
class Stall(NcclTransferFault):
    """From the `nth` matching transfer on, no data moves, and there is no error. `for` is the duration."""

    name = "nccl.stall"
    kind = NetKind.STALL


@dataclass(frozen=True)
class Flap(NcclTransferFault):
    """No data moves for `down`, then data moves for `up`, and so on in turns, as with a link that goes down again and
    again."""

    down: Seconds = 1.0
    up: Seconds = 1.0

    name = "nccl.flap"
    kind = NetKind.FLAP

    def amounts(self) -> tuple[int, int]:
        return round(self.down * 1e9), round(self.up * 1e9)

    def proof(self, record: Record, fault: str) -> Evidence | None:
        share = self.down / (self.down + self.up)
        return slower(record, fault, self.down / 2, factor=1 + share)


@dataclass(frozen=True)
class Delay(NcclTransferFault):
    """Each transfer begins late by `time`, counted for sent data from the moment at which NCCL gave it to the network,
    and for received data from the arrival of its first bytes. Transfers keep their order."""

    time: Seconds = 0.01

    name = "nccl.delay"
    kind = NetKind.DELAY

    def amounts(self) -> tuple[int, int]:
        return round(self.time * 1e9), 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault, self.time)


@dataclass(frozen=True)
class Throttle(NcclTransferFault):
    """All matching connections together get at most `megabytes` (of a million bytes) per second in each direction, as
    with a network card that fell back to a lower rate."""

    megabytes: Positive = 10.0

    name = "nccl.throttle"
    kind = NetKind.THROTTLE

    def amounts(self) -> tuple[int, int]:
        return max(1, round(self.megabytes * 1e6)), 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault)
