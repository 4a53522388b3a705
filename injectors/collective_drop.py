"""collective.drop: the rank leaves out one collective and continues as if it had been done, so the ranks no longer
match."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record
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
