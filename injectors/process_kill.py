"""process.kill: the rank dies at once and without warning, as under the OOM killer or on a lost node."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Site, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL to the rank. No handler runs, no buffer is flushed."""

    name: ClassVar[str] = "process.kill"
    where: ClassVar[tuple[Where, ...]] = (
        "rank",
        "node",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd"})
    lethal: ClassVar[bool] = True

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead process can't be brought back; restarting it is the job's affair")

    def apply(self, site: Site) -> None:
        site.signal(signal.SIGKILL)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGKILL)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, -signal.SIGKILL)
