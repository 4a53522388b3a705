"""The collectives of the ranks no longer match.

- collective.drop: the rank leaves out one collective and continues as if it had been done
- collective.reorder: the rank starts two collectives in the wrong order"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Evidence, Fault, Irreversible, Kind, NodeSite, RankSite, Record, Seconds
from torchaos.plugin.evidence import out_of_step


@dataclass(frozen=True)
class Drop(Fault):
    """Leaves out one collective of the rank. The other ranks are still in that collective when this rank enters its
    next one. Depending on the backend, these two collectives are matched (wrong values without an error, if the sizes
    are equal), fail, or never end."""

    name = "collective.drop"
    where = ("rank",)
    needs = frozenset({"agent"})
    phase = "collective"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a collective that was left out can't be done later: the other ranks have gone on")

    def apply(self, site: RankSite) -> None:
        call = site.call
        call.instead = lambda through: call.left_out()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return out_of_step(record, fault)


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
