"""What the faults share in which a rank waits until they are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, NodeSite, Where
    from torchaos.harness.record.record import Record


class WaitingFault(Fault):
    """The rank waits where the fault's `phase` begins. Nothing but the fault's own control page holds it, and that is
    guarded for every fault."""

    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lasting: ClassVar[bool] = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()

    def apply(self, site: Any) -> None:
        site.lease.sleep()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.waits import all_waited

        return all_waited(record, fault)
