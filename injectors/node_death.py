"""A whole node dies, torchrun and ranks together.

- node.kill: at once, as after a power loss
- node.preempt: a spot machine gets its notice, and is taken away after the notice period
- node.reboot: the node stays away, and comes back with a new torchrun"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Evidence, Kind, NodeSite, Record, Seconds
from torchaos.plugin.families.nodes import (
    BACK,
    DISK_LOST,
    NodeDeath,
    ended,
    heads,
    kill,
    left,
    processes_of,
    send,
    tell,
)


@dataclass(frozen=True)
class Kill(NodeDeath):
    """Sends SIGKILL to every process of the job on the target nodes. The node's kernel runs on, so open connections of
    these processes are reset."""

    name = "node.kill"

    def apply(self, site: NodeSite) -> None:
        kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return ended(record, fault)


@dataclass(frozen=True)
class Preempt(NodeDeath):
    """Sends SIGTERM to torchrun on the target nodes, and SIGKILL to all processes that are left there after `notice`
    seconds."""

    notice: Seconds = 30.0

    name = "node.preempt"

    def apply(self, site: NodeSite) -> None:
        targets = processes_of(site.nodes)
        send(heads(targets), signal.SIGTERM)
        tell(site, targets, "got SIGTERM")
        site.release()  # the job decides how it uses this time
        end = time.monotonic() + self.notice
        while (left := any(live.processes() for live in site.nodes)) and time.monotonic() < end:
            time.sleep(0.05)
        said = "some processes were left when the time was over" if left else "all were gone in time"
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": said})
        if left:
            kill(site)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return left(record, fault)


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
