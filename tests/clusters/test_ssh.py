"""launcher: ssh through a real sshd on each node, as a user without rights."""

from __future__ import annotations

import pytest
from clusters.runs import FROZEN
from clusters.slurm import Slurm
from clusters.ssh import SshRun

from torchaos.harness.protocol.wire import Kind

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_node_stops_for_its_time(ssh: Slurm) -> None:
    """The agent of the second machine stops the processes there, and resumes them when the time is over; then the job
    ends well, and nothing is left on either machine."""
    run = SshRun(ssh, "over-ssh", {**FROZEN, "for": "1s"})
    said = run.end()
    assert run.process.returncode == 0, said
    (back,) = run.events(Kind.ROLLED_BACK)
    stopped = {event.source for event in run.events(Kind.RANK_STATE)}
    assert (back.source, back.data["verified"], stopped) == ("node1", True, {"node1"})
    offsets = {event.data["node"]: round(event.data["offset_s"]) for event in run.events(Kind.CLOCK)}
    assert offsets == {0: -1_000_000, 1: -2_000_000}
    run.is_clean()
