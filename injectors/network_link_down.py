"""network.link_down: the node's cable is pulled, once or repeatedly (a flapping link)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Handle, NodeSite, Probe, Record, Seconds
from torchaos.plugin.families.network import counted, helper_of, late, link_of, measured, meter_handle, resent
from torchaos.plugin.undo import LinkUp


@dataclass(frozen=True)
class LinkDown(Fault):
    """The link of each target node goes down, and both ends lose their carrier. With `up` the link flaps: it is down
    for `down`, then up for `up`, and so on until the fault is undone."""

    down: Seconds = 1.0
    up: Seconds = 0.0

    name = "network.link_down"
    where = ("node",)
    needs = frozenset({"links"})
    hits = "nodes"
    on_collectives = True

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        links = [link_of(live) for live in site.nodes]
        ports = [LinkUp(link.switch.pid, link.switch.start_ticks, link.port) for link in links]
        return [*ports, *(helper_of(site.fault, link).handle for link in links), meter_handle(site)]

    def apply(self, site: NodeSite) -> None:
        for link in map(link_of, site.nodes):
            down = ["ip", "link", "set", "dev", link.port, "down"]
            link.switch.run(down)
            if self.up:
                command = " ".join(down[:-1])
                loop = f"while :; do sleep {self.down}; {command} up; sleep {self.up}; {command} down; done"
                helper_of(site.fault, link).start(link.switch, ["sh", "-c", loop])

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [*resent(site), *measured(site, self.asked())]

    def asked(self) -> dict[str, float]:
        """The expected quality of the link during the fault: a loss of 100 %, unless the link flaps."""
        return {} if self.up else {"loss_percent": 100.0}

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, "timeouts", "resent") or late(record, fault, 0.8 * self.down)
