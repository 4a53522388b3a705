"""Nodes that are network namespaces: which other nodes they reach, and what is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.job import StartedNode
from torchaos.harness.running.launchers.local import NetnsNode, keepers, make_links
from torchaos.harness.running.launchers.torchrun_line import elastic_env


def test_every_node_has_its_own_name_and_finds_the_others(links: list[Link]) -> None:
    """Host name, address and the names of the others are the node's own; no name server is asked."""
    for index, link in enumerate(links):
        look = "import socket as s; print(s.gethostname(), *(s.gethostbyname(f'node00{n}') for n in range(3)))"
        said = subprocess.check_output(link.namespace.enter([sys.executable, "-c", look], Path("/")), text=True).split()
        assert said == [f"node00{index}", *(one.address for one in links)]


def test_a_node_keeps_the_working_directory(links: list[Link], tmp_path: Path) -> None:
    """A command finds the files of the host where it would find them there."""
    assert subprocess.check_output(links[1].namespace.enter(["pwd"], tmp_path), text=True).strip() == str(tmp_path)


def test_nodes_hear_each_other_and_nobody_else(links: list[Link], wire: Any) -> None:
    """Every datagram comes; the host's own network is out of reach."""
    assert [number for number, _ in wire.send(20)] == list(range(20))
    devices = links[0].namespace.run(["ip", "-br", "link"]).split("\n")
    assert sorted(line.split()[0].partition("@")[0] for line in devices if line) == ["eth0", "lo"]


def test_each_node_has_a_local_disk_of_its_own(folder: Path, fresh_run: str) -> None:
    """A file that a node writes to its local disk is on no other node and not on this machine, and stays until the
    node loses its disk; the rest of the file system is common to all."""
    local, shared = folder / "local", folder / "shared"
    made = make_links(folder, 2, fresh_run, local)
    nodes = [NetnsNode(index, link, folder, {}) for index, link in enumerate(made)]

    def on(node: NetnsNode, *words: str) -> str:
        return subprocess.check_output(node.argv(words), text=True)

    for path in (local / "shard", shared):
        on(nodes[0], "touch", str(path))
    assert on(nodes[0], "ls", str(local)) == "shard\n"
    assert on(nodes[1], "ls", str(local)) == ""
    assert on(nodes[1], "ls", str(shared)) == f"{shared}\n"
    assert list(local.iterdir()) == []
    StartedNode(nodes[0], fresh_run, dict, lambda _node: 0, lambda _node: None, local).lose_disk()
    assert on(nodes[0], "ls", str(local)) == ""
    JobProcesses(keepers(fresh_run)).undo()


def test_nothing_is_made_in_the_hosts_own_namespaces(folder: Path, fresh_run: str) -> None:
    """Devices, named namespaces and mounts of the host are the same before, meanwhile and afterwards."""

    def host() -> tuple[str, ...]:
        named = sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []
        devices = subprocess.check_output(["ip", "-o", "link"], text=True)
        return (devices, Path("/proc/self/mounts").read_text(), *named)

    before = host()
    made = make_links(folder, 2, fresh_run)
    assert host() == before
    JobProcesses(keepers(fresh_run)).undo()
    assert not any(link.namespace.alive() or link.switch.alive() for link in made)
    assert host() == before


def test_the_namespaces_go_with_their_keeper(folder: Path, fresh_run: str) -> None:
    """When the one process that made them is killed, those that keep them die too."""
    made = make_links(folder, 2, fresh_run)
    children = {link.namespace.pid for link in made} | {made[0].switch.pid}
    (keeper,) = processes.family(keepers(fresh_run)).keys() - children
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: any(link.namespace.alive() for link in made), lambda alive: not alive)


_HARNESS = """
import os, signal, sys
from pathlib import Path
from torchaos.harness.interfaces import JobSpec
from torchaos.harness.running.launchers.local import Netns
from torchaos.harness.fault_drivers.network.links import PacketDrop
from torchaos.harness.rollback.reaper_client import ReaperClient
run, folder = sys.argv[1], Path(sys.argv[2])
launcher = Netns()
spec = JobSpec(("true",), folder, {"TORCHAOS_RUN_ID": run}, folder / "logs" / "job-0.log", 0, 2)
reaper = ReaperClient.start(folder, run)
reaper.record_undo("launcher", launcher.resources(spec), owner="launcher")
nodes = launcher.create(spec)
cut = PacketDrop("cut", [nodes[0].link], [nodes[1].link])
reaper.record_undo("cut", cut.handles, owner="cut")
cut.apply()
print(nodes[0].link.switch.pid, *(node.link.namespace.pid for node in nodes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_harness_is_killed(tmp_path: Path, fresh_run: str, links: Any) -> None:
    """SIGKILL of the harness in the middle of a partition: the reaper ends every process that keeps a namespace."""
    (tmp_path / "undo").mkdir()
    said = subprocess.run(
        [sys.executable, "-c", _HARNESS, fresh_run, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
    assert said.returncode == -signal.SIGKILL
    pids = list(map(int, said.stdout.split()))
    assert len(pids) == 3
    wait_until(lambda: processes.family(keepers(fresh_run)), lambda left: not left)
    wait_until(lambda: [pid for pid in pids if os.path.exists(f"/proc/{pid}/ns/net")], lambda left: not left)


def test_what_can_not_be_made_is_said(
    folder: Path, fresh_run: str, links: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A keeper that fails says why in one sentence, and leaves no process."""
    (tmp_path / "ip").write_text("#!/bin/sh\necho 'the disk is full' >&2\nexit 1\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ChaosError, match="can't be made: ip: the disk is full"):
        make_links(folder, 2, fresh_run)
    assert processes.family(keepers(fresh_run)) == {}


_NOBODY = """
import os, subprocess, sys, tempfile
from pathlib import Path
from torchaos.harness.running.launchers.job import StartedNode as LiveNode
from torchaos.harness.running.launchers.local import NetnsNode, keepers, make_links
from torchaos.harness.fault_drivers.network.links import PacketDrop
from torchaos.harness.rollback.handles import JobProcesses
import json, random, socket  # from here on our own Python can't be read
run = sys.argv[1]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.executable = "/usr/bin/python3"
links = make_links(Path(tempfile.mkdtemp()), 2, run)
print(*(subprocess.check_output(link.namespace.enter(["hostname"], Path("/")), text=True).strip() for link in links))
cut = PacketDrop("cut", links[:1], links[1:])
cut.apply()
print(cut.handles[0].is_undone())
cut.handles[0].undo()
print(cut.handles[0].is_undone())
JobProcesses(keepers(run)).undo()
"""


def test_without_being_root(links: Any, fresh_run: str) -> None:
    """Any user who may make user namespaces can make nodes, cut them apart and take that back."""
    python = ["unshare", "--user", "--net", "/usr/bin/python3", "-S", "-E", "-c", "pass"]
    may = subprocess.run(python, user=65534, group=65534, extra_groups=[], stderr=subprocess.PIPE, check=False)
    if may.returncode:
        pytest.skip(f"no user namespaces, or no /usr/bin/python3, for an ordinary user: {may.stderr.decode().strip()}")
    said = subprocess.run([sys.executable, "-c", _NOBODY, fresh_run], stdout=subprocess.PIPE, text=True, check=False)
    assert said.stdout.split() == ["node000", "node001", "False", "True"]


def test_what_the_user_sets_stays() -> None:
    """Torchrun's defaults come from the launcher, and every one that the user sets is the user's."""
    from torchaos.harness.interfaces import JobSpec

    env = {"TORCHAOS_RUN_ID": "r", "PET_RDZV_ID": "mine", "PET_RDZV_CONF": "join_timeout=5", "GLOO_SOCKET_IFNAME": "x"}
    spec = JobSpec(("true",), Path("/"), env, Path("/run/logs/job-0.log"), 1, 2)
    found = elastic_env(1, spec, "node000", "node001", "eth0")
    assert not found.keys() & {"PET_RDZV_ID", "GLOO_SOCKET_IFNAME"}
    assert found["PET_RDZV_CONF"] == "is_host=0,join_timeout=5"
    assert (found["PET_NNODES"], found["PET_RDZV_ENDPOINT"]) == ("2", "node000:29400")


def test_a_tcp_connection_goes_through(connection: tuple[socket.socket, socket.socket]) -> None:
    """What is sent on one node is read on the other."""
    ours, theirs = connection
    ours.sendall(b"x" * 100_000)
    theirs.settimeout(20)
    got = 0
    while got < 100_000:
        got += len(theirs.recv(1 << 16))
    assert got == 100_000
