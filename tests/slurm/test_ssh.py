"""launcher: ssh through a real sshd on each node, as a user without rights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from dying.families import STAND_IN
from waiting import wait_until

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.rundir import RunDir

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

_SSHD = """Port 22
HostKey {base}/home/host_key
AuthorizedKeysFile {base}/home/.ssh/authorized_keys
PasswordAuthentication no
UsePAM no
StrictModes no
"""
_CLIENT = """IdentityFile {base}/home/.ssh/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""


@pytest.fixture
def reachable(cluster: Any) -> Iterator[Any]:
    """The nodes n1 and n2 with a server each, and a key of the user that opens both."""
    if shutil.which("sshd", path="/usr/sbin") is None:
        pytest.skip("a server of ssh is needed: apt-get install openssh-server")
    home = cluster.base / "home"
    make = "mkdir -p .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/key && cp .ssh/key.pub .ssh/authorized_keys"
    code, said = cluster.as_user("sh", "-c", f"cd {home} && {make}")
    assert code == 0, said
    (home / ".ssh" / "config").write_text(_CLIENT.format(base=cluster.base))
    (cluster.base / "sshd_config").write_text(_SSHD.format(base=cluster.base))
    cluster.as_root("head", "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{home}/host_key")
    for node in ("n1", "n2"):
        cluster.as_root(node, "sh", "-c", f"mkdir -p /run/sshd && /usr/sbin/sshd -f {cluster.base}/sshd_config")
    yield cluster
    for node in ("n1", "n2"):
        for pid in cluster.pids(node, "sshd -f"):
            cluster.as_root(node, "kill", str(pid))


def test_a_node_stops_for_its_time(reachable: Any) -> None:
    """The agent of the second machine stops the processes there, and resumes them when the time is over; then the job
    ends well, and nothing is left on either machine."""
    cluster = reachable
    job = {
        "command": f"{{python}} {STAND_IN}/torchrun --nproc-per-node 1 "
        f"{STAND_IN}/train.py 60 --save {{run}}/checkpoints",
        "hosts": ["n1", "n2"], "world_size": 2, "timeout": "100s", "checkpoints": {"path": "{run}/checkpoints"},
    }  # fmt: skip
    fault = {
        "inject": "node.freeze", "target": {"node": 1}, "when": {"step": 8, "phase": "backward"}, "for": "1s",
    }  # fmt: skip
    file = cluster.shared / "over-ssh.yaml"
    scenario = {
        "scenario": "over-ssh", "launcher": "ssh", "job": job, "faults": [fault], "twin": "none",
        "assert": [{"completed": {"steps": 60}}],
    }  # fmt: skip
    file.write_text(json.dumps(scenario))
    options = f"-o IdentitiesOnly=yes -F {cluster.base}/home/.ssh/config"
    (cluster.base / "home" / "bin").mkdir(exist_ok=True)
    ssh = cluster.base / "home" / "bin" / "ssh"  # a user's configuration: OpenSSH reads the home of the passwd file
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh {options} "$@"\n')
    ssh.chmod(0o755)
    path = f"PATH={ssh.parent}:/usr/bin:/bin"
    code, said = cluster.as_user("sh", "-c", f"{path}:$PATH exec torchaos run {file} --out runs", timeout_s=300)
    assert code == 0, said
    (folder,) = (cluster.shared / "runs").glob("over-ssh-s0-*")
    events = read_events(RunDir(folder).events)
    back = next(event for event in events if event.kind is Kind.ROLLED_BACK)
    stopped = {event.source for event in events if event.kind is Kind.RANK_STATE}
    assert (back.source, back.data["verified"], stopped) == ("node1", True, {"node1"})
    offsets = {event.data["node"]: round(event.data["offset_s"]) for event in events if event.kind is Kind.CLOCK}
    assert offsets == {0: -1_000_000, 1: -2_000_000}
    for node in ("head", "n1", "n2"):
        wait_until(partial(cluster.pids, node, "over-ssh-s0"), lambda left: not left)
