"""The base classes of faults that ranks apply to themselves. Injectors get them from `torchaos.plugin`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import ClassVar

from torchaos.plugin import Evidence, Fault, Handle, Irreversible, NodeSite, RankSite, Record, all_waited, died


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
