"""network.dns: a node can't look up the names of the other nodes; open connections continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Record
from torchaos.plugin.families.network import link_of, logged
from torchaos.plugin.undo import Names

# Words of a failed look-up in the error of a client, such as an HTTP client.
_OF_A_CLIENT = ("Name or service not known", "name resolution", "No address associated")


@dataclass(frozen=True)
class Dns(Fault):
    """On the target nodes only the name localhost can be looked up."""

    name = "network.dns"
    where = ("node",)
    needs = frozenset({"links"})
    hits = "nodes"

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        links = [link_of(live) for live in site.nodes]
        namespaces = [(link.namespace.pid, link.namespace.start_ticks, link.names_file) for link in links]
        return [Names(pid, ticks, file, Path(file).read_text()) for pid, ticks, file in namespaces]

    def apply(self, site: NodeSite) -> None:
        for link in map(link_of, site.nodes):
            # Written in place: a new file with this name would not be the file that the node has mounted.
            with open(link.names_file, "r+") as file:
                file.truncate()
                file.write("127.0.0.1 localhost\n")

    def felt(self, record: Record, fault: str) -> Evidence | None:
        said = "the job could not look a name up"
        return logged(record, fault, "name-lookup", said) or logged(record, fault, "endpoint", said, _OF_A_CLIENT)
