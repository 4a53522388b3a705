"""The data that NCCL sends and receives, and the network that it sees.

- nccl.stall, nccl.flap, nccl.delay, nccl.throttle: the data stops, is late or is slow
- nccl.error, nccl.refuse: the network gives an error, or makes no connection
- nccl.corrupt: one byte of the data arrives wrong, without an error
- nccl.nics: NCCL sees fewer or slower network cards than the machine has"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchaos.plugin import Count, Evidence, Irreversible, Kind, NodeSite, Positive, Record, Seconds, Target
from torchaos.plugin.evidence import all_waited, out_of_step, seen_by_others, seen_by_twin, slower
from torchaos.plugin.families.ranks import NcclNetFault, NcclTransferFault, NetKind


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


_CODES = {"system": 2, "remote": 6}  # ncclSystemError, ncclRemoteError


@dataclass(frozen=True)
class Error(NcclTransferFault):
    """From the `nth` matching transfer on, the network gives NCCL an error, as an InfiniBand adapter does after its
    last retry. `code`: a system error, or an error of the remote side. NCCL does not use the communicator again."""

    code: Literal["system", "remote"] = "system"

    name = "nccl.error"
    kind = NetKind.FAIL

    def amounts(self) -> tuple[int, int]:
        return _CODES[self.code], 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return out_of_step(record, fault)


@dataclass(frozen=True)
class Refuse(NcclNetFault):
    """The rank gets no new connection with `peers` (by default all ranks): a connection is never ready, or fails, as
    `how` says. NCCL connects when a communicator is made or first used, so trigger the fault in the phase `start` of an
    attempt."""

    peers: list[int] = field(default_factory=list)
    way: Literal["both", "out", "in"] = "both"
    how: Literal["never_ready", "system", "remote"] = "never_ready"

    name = "nccl.refuse"
    kind = NetKind.REFUSE

    def amounts(self) -> tuple[int, int]:
        return _CODES.get(self.how, 0), 0

    def which(self) -> Mapping[str, Any]:
        return {"peers": self.peers, "way": self.way}

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return (all_waited if self.how == "never_ready" else out_of_step)(record, fault)


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
