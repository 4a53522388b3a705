"""collective.reorder: the rank starts two collectives the wrong way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.agent.wire import Kind

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Reorder(Fault):
    """Keeps one collective back until the rank has started the next one. That takes a job that starts several before it
    waits, as DDP does with its buckets; where none follows within `patience`, it is started after all, nothing is out
    of order, and the fault was not felt."""

    patience: Seconds = 2.0

    name: ClassVar[str] = "collective.reorder"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    phase: ClassVar[str | None] = "collective"

    def changes(self, site: Any) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible(f"what was kept back is started after the next one, or after {self.patience} s")

    def apply(self, site: Any) -> None:
        site.call.instead = lambda through: self._keep_back(site, through)

    def _keep_back(self, site: Any, through: Any) -> Any:
        def started(after: str | None) -> None:
            effect = f"started after {after}" if after else "nothing followed, so the order stayed as it was"
            site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect, "reordered": after is not None})

        return site.call.kept_back(through, site, self.patience, started)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.waits import out_of_step

        effects = record.of_fault(fault, Kind.EFFECT)
        return out_of_step(record, fault) if any(event.data.get("reordered") for event in effects) else None
