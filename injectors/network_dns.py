"""network.dns: the node no longer finds the others by name; connections that stand go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Dns(Fault):
    """On the target nodes no name but localhost can be looked up."""

    name: ClassVar[str] = "network.dns"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"links"})
    hits: ClassVar[Hits] = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        from torchaos.harness.mechanics.network.link import link_of
        from torchaos.harness.undo.network import Names

        links = [link_of(live) for live in site.nodes]
        spaces = [(link.space.pid, link.space.start_ticks, link.names_file) for link in links]
        return [Names(pid, ticks, file, Path(file).read_text()) for pid, ticks, file in spaces]

    def apply(self, site: NodeSite) -> None:
        from torchaos.harness.mechanics.network.link import link_of

        for link in map(link_of, site.nodes):
            with open(link.names_file, "r+") as file:  # in place: the node has this very file mounted
                file.truncate()
                file.write("127.0.0.1 localhost\n")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.network.evidence import logged

        return logged(record, fault, "name-lookup", "the job could not look a name up")
