"""collective.drop: the rank leaves one collective out and goes on as if it had been done: the ranks no longer match."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record, out_of_step


@dataclass(frozen=True)
class Drop(Fault):
    """What comes after depends on the backend: the next collective of the rank may meet this one of the others (wrong
    values, silently, where the sizes fit), fail, or never end."""

    name = "collective.drop"
    where = ("rank",)
    needs = frozenset({"agent"})
    phase = "collective"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a collective that was left out can't be made up for: the others are past it")

    def apply(self, site: RankSite) -> None:
        call = site.call
        call.instead = lambda through: call.left_out()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return out_of_step(record, fault)
