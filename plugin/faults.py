"""The base classes of faults that ranks apply to themselves. Injectors get them from `torchaos.plugin`."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchaos.harness.agent.nccl_net import NetKind, NetOrder
from torchaos.plugin import (
    Count,
    Evidence,
    Fault,
    Handle,
    Irreversible,
    Kind,
    NodeSite,
    RankSite,
    Record,
    Size,
    all_waited,
    died,
)


class DeathFault(Fault):
    """The target process ends by it."""

    lethal = True
    irreversible: ClassVar[str] = "a dead process can't be brought back; restarting it is the job's affair"

    @property
    def code(self) -> int:
        """The exit code, or minus the number of the signal that ends the process."""
        return -signal.SIGKILL

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(self.irreversible)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, self.code)


class WaitingFault(Fault):
    """The rank waits where the fault's `phase` begins. Only the fault's own control page holds it, and that is guarded
    for every fault."""

    where = ("rank",)
    needs = frozenset({"agent"})
    lasting = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()

    def apply(self, site: RankSite) -> None:
        site.lease.sleep()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return all_waited(record, fault)


class NcclNetFault(Fault):
    """It changes what NCCL's connections of the rank do, by a network plug-in that NCCL loads. Only the fault's own
    control page keeps it on. An injector says of which `kind` it is, with which `amounts` (see `NetKind`), and which
    connections it is about (the fields of `NetOrder`)."""

    where = ("rank",)
    needs = frozenset({"agent", "gpu", "nccl", "nccl_net"})
    lasting = True
    kind: ClassVar[NetKind]

    def amounts(self) -> tuple[int, int]:
        return 0, 0

    def which(self) -> Mapping[str, Any]:
        return {}

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()

    def apply(self, site: RankSite) -> None:
        site.nccl_net(NetOrder(self.kind, *self.amounts(), **self.which()))

    def felt(self, record: Record, fault: str) -> Evidence | None:
        # A rank that died meanwhile reports nothing any more.
        hit_nothing = any(note.data.get("hits") == 0 for note in record.of_fault(fault, Kind.NOTE))
        return None if hit_nothing else self.proof(record, fault)

    def proof(self, record: Record, fault: str) -> Evidence | None:
        """Proof by others than the rank that was hit, which reports that the fault hit something."""
        return all_waited(record, fault)


@dataclass(frozen=True)
class NcclTransferFault(NcclNetFault):
    """It hits transfers of the rank: to and from `peers` (ranks; none: all), in the direction `way`, of the connection
    of that number (each pair of ranks numbers its own from 0, in each direction), and of that size."""

    peers: list[int] = field(default_factory=list)
    way: Literal["both", "out", "in"] = "both"
    connection: int | None = None
    min_bytes: Size = 0
    max_bytes: int | None = None
    nth: Count = 1

    def which(self) -> Mapping[str, Any]:
        names = ("peers", "way", "connection", "min_bytes", "max_bytes", "nth")
        return {name: getattr(self, name) for name in names}
