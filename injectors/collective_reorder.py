"""collective.reorder: the rank starts two collectives in the wrong order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Evidence, Fault, Irreversible, Kind, NodeSite, RankSite, Record, Seconds
from torchaos.plugin.evidence import out_of_step


@dataclass(frozen=True)
class Reorder(Fault):
    """Holds one collective back until the rank has started the next one. The job must start several collectives before
    it waits, as DDP does with its buckets. If the rank starts no other collective within `patience`, the collective is
    started after all: then the order is right, and the fault was not felt."""

    patience: Seconds = 2.0

    name = "collective.reorder"
    where = ("rank",)
    needs = frozenset({"agent"})
    phase = "collective"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(f"the collective is started after the next one, or after {self.patience} s")

    def apply(self, site: RankSite) -> None:
        site.call.instead = lambda through: self._keep_back(site, through)

    def _keep_back(self, site: RankSite, through: Any) -> Any:
        def started(after: str | None) -> None:
            effect = f"started after {after}" if after else "no other collective followed, so the order was not changed"
            site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect, "reordered": after is not None})

        return site.call.kept_back(through, site, self.patience, started)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        effects = record.of_fault(fault, Kind.EFFECT)
        return out_of_step(record, fault) if any(event.data.get("reordered") for event in effects) else None
