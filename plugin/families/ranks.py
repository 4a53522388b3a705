"""Faults that are applied in a rank."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchaos.harness.agent.collectives.collective_calls import Call
from torchaos.harness.agent.injection.rank_site import Lease
from torchaos.harness.protocol.agent_plan import Collectives
from torchaos.harness.protocol.check_sums import as_integers, local
from torchaos.harness.protocol.nccl_connections import NetKind, NetOrder
from torchaos.plugin import Count, Evidence, Fault, Handle, Irreversible, Kind, NodeSite, RankSite, Record, Size
from torchaos.plugin.evidence import all_waited, broke_off, died, ended_before_twin

__all__ = [
    "Call", "Collectives", "DeathFault", "ExceptionFault", "Lease", "NcclNetFault", "NcclTransferFault", "NetKind",
    "WaitingFault", "as_integers", "local",
]  # fmt: skip


class DeathFault(Fault):
    """A fault that ends the target process."""

    lethal = True
    irreversible: ClassVar[str] = "a dead process can't be brought back; the job has to restart it"

    @property
    def code(self) -> int:
        """The exit code, or minus the number of the signal that ends the process."""
        return -signal.SIGKILL

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(self.irreversible)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, self.code)


class ExceptionFault(Fault):
    """A fault that raises an exception in the rank. It is felt if the rank then ends before its work is done, or if the
    job catches it and goes back to an earlier state, or stands still until an error is in its log."""

    where = ("rank",)
    needs = frozenset({"agent"})
    codes: ClassVar[Sequence[int]] = (*range(1, 256), -signal.SIGABRT)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, *self.codes) or broke_off(record, fault)

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        return ended_before_twin(record, twins, fault)


class WaitingFault(Fault):
    """A fault that makes the rank wait at the beginning of a `phase`. The rank waits on the fault's control page, whose
    undo is on disk for every fault, so a subclass has no other change to undo."""

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
    """A fault of the rank's NCCL connections, made by a network plug-in that NCCL loads. It ends when the fault's
    control page is cleared. A subclass gives its `kind`, its `amounts` (see `NetKind`), and the connections that it
    hits (the fields of `NetOrder`)."""

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
        # A rank that has died reports nothing.
        hit_nothing = any(note.data.get("hits") == 0 for note in record.of_fault(fault, Kind.NOTE))
        return None if hit_nothing else self.proof(record, fault)

    def proof(self, record: Record, fault: str) -> Evidence | None:
        """Proof by another witness, after the rank that was hit has itself reported the hit."""
        return all_waited(record, fault)


@dataclass(frozen=True)
class NcclTransferFault(NcclNetFault):
    """A fault of the rank's transfers. `peers`: the ranks at the other end (none: all). `way`: the direction.
    `connection`: its number; each pair of ranks counts its connections from 0, in each direction. `min_bytes`,
    `max_bytes`: the size of a transfer."""

    peers: list[int] = field(default_factory=list)
    way: Literal["both", "out", "in"] = "both"
    connection: int | None = None
    min_bytes: Size = 0
    max_bytes: int | None = None
    nth: Count = 1

    def which(self) -> Mapping[str, Any]:
        names = ("peers", "way", "connection", "min_bytes", "max_bytes", "nth")
        return {name: getattr(self, name) for name in names}
