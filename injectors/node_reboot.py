"""node.reboot: a node dies, stays away, and comes back with a new torchrun."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Evidence, Kind, NodeSite, Record, Seconds
from torchaos.plugin.families.nodes import BACK, DISK_LOST, NodeDeath, ended, kill


@dataclass(frozen=True)
class Reboot(NodeDeath):
    """Kills the node like node.kill, and starts the job's command there again after `away` seconds. `disk`: its local
    disk (job.checkpoints.local) is kept, or lost like its memory, as if another machine took its place."""

    away: Seconds = 5.0
    disk: Literal["kept", "lost"] = "kept"

    name = "node.reboot"
    irreversible = "the contents of its memory are lost; the node itself comes back"

    def apply(self, site: NodeSite) -> None:
        for live in site.nodes:
            live.keep_place()
        try:
            kill(site)
            if self.disk == "lost":
                for live in site.nodes:
                    live.lose_disk()
                    lost = {"effect": f"node {live.node.index} lost its local disk", "what": DISK_LOST}
                    site.emit(Kind.EFFECT, {"fault": site.fault, "node": live.node.index, **lost})
            site.release()
            time.sleep(self.away)
        finally:
            for live in site.nodes:
                pid = live.start_again()
                site.emit(
                    Kind.EFFECT,
                    {"fault": site.fault, "effect": f"node {live.node.index} is back, pid {pid}", "what": BACK},
                )

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return ended(record, fault)
