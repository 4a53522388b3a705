"""nccl.stall, .flap, .delay and .throttle: what NCCL sends or receives stops, comes late or comes slowly."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Evidence, NcclTransferFault, NetKind, Positive, Record, Seconds, slower


@dataclass(frozen=True)
class Stall(NcclTransferFault):
    """Nothing moves, from the `nth` transfer that is meant on, and no error comes. `for` says how long."""

    name = "nccl.stall"
    kind = NetKind.STALL


@dataclass(frozen=True)
class Flap(NcclTransferFault):
    """Nothing moves for `down`, then all does for `up`, and so on, as with a link that comes and goes."""

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
    """Each transfer begins `time` later: counted from when NCCL gave it to the network, or (what is received) from when
    its first bytes came, so that one waits behind the other."""

    time: Seconds = 0.01

    name = "nccl.delay"
    kind = NetKind.DELAY

    def amounts(self) -> tuple[int, int]:
        return round(self.time * 1e9), 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault, self.time)


@dataclass(frozen=True)
class Throttle(NcclTransferFault):
    """At most `megabytes` a second (of a million bytes), of all connections that are meant together, in each direction:
    as with a NIC that fell back to a lower rate."""

    megabytes: Positive = 10.0

    name = "nccl.throttle"
    kind = NetKind.THROTTLE

    def amounts(self) -> tuple[int, int]:
        return max(1, round(self.megabytes * 1e6)), 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return slower(record, fault)
