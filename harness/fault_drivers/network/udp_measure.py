"""Compares the requested values of a network fault with measured values: a probe connection beside the job's
connections measures while the fault is on. It shows only how the probe's own packets were treated. Counters of the
job's own connections show that the job felt the fault (see traffic_counters.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.agent.wire import Kind
from torchaos.harness.fault_drivers.network import udp_probe
from torchaos.harness.fault_drivers.network.links import Helper, Link, link_of
from torchaos.harness.interfaces import Emit, Handle, NodeSite
from torchaos.harness.rollback.network_handles import mark_of

SETTLE_S = 0.3  # seconds, in addition to the requested delay


def meter_handle(site: NodeSite) -> Handle:
    """The handle of the process that `measured` starts."""
    return _helper(site).handle


def measured(
    site: NodeSite, asked: Mapping[str, float], inward: bool = False, jitter_ms: float = 0.0
) -> Sequence[Measuring]:
    """Probes that measure the link from the first target node to the first other node (`inward`: in the other
    direction). Empty if no requested value can be measured, or if this process can't enter the other node. With jitter,
    datagrams are sent at such intervals that none waits for an earlier one."""
    if not asked:
        return ()
    inside = [link_of(live) for live in site.nodes]
    targets = {live.node.index for live in site.nodes}
    outside = [link_of(live) for live in site.cluster if live.node.index not in targets] or inside[1:]
    if not outside or not outside[0].space.alive():
        return ()
    ends = (outside[0], inside[0]) if inward else (inside[0], outside[0])
    settle_s = SETTLE_S + 2e-3 * asked.get("delay_ms", 0.0)
    return [
        Measuring(
            site.fault, dict(asked), _start(_helper(site), *ends, settle_s, max(udp_probe.GAP_S, 2.2e-3 * jitter_ms))
        )
    ]


@dataclass
class Measuring:
    """A probe that emits the measured values with the requested values, as `network.sample` events."""

    fault: str
    asked: Mapping[str, float]
    process: subprocess.Popen[bytes]
    period_s: float = 0.25
    _rest: bytes = field(default=b"")

    def sample(self, emit: Emit) -> None:
        assert self.process.stdout is not None
        try:
            self._rest += os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            printed = json.loads(lines[-1])
            values = {name: printed[name] for name in self.asked if name in printed}
            emit(Kind.NETWORK, {"fault": self.fault, "counts": {}, "measured": values, "datagrams": printed["sent"]})


def _helper(site: NodeSite) -> Helper:
    return Helper(f"{link_of(site.nodes[0]).run_id}.{mark_of(site.fault)}.meter")


def _start(helper: Helper, sender: Link, receiver: Link, settle_s: float, gap_s: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-S", "-E", udp_probe.__file__, str(receiver.space.pid)]
    argv += [sender.address, receiver.address, str(settle_s), str(gap_s)]
    process = helper.open(sender.space, argv)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process
