"""Network faults that the agent of a pod applies to its own network. A node's namespace plays the pod, and the agent's
part in it is this script."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness import registry
from torchaos.harness.fault_drivers.network.links import Link, PacketDrop
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.rollback.network_handles import NftTable
from torchaos.harness.running.fault_checks import NotPermitted, Permits, misfit

PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun",), "/job", {}, 2, 2, 60.0), (), ())
AGENT = """
import json, sys, time
from pathlib import Path
from torchaos.harness import registry
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.running.nodes.node_agent import NodePart
from torchaos.harness.running.nodes.node_exec import links_of_pods
addresses, targets, name, params = json.loads(sys.argv[1])
part = NodePart(None, 0, "run", {}, links_of_pods(addresses, 0, "run")).beside(targets)
effects = []
emit = lambda kind, data: effects.append(data["effect"]) if kind is Kind.EFFECT else None
cluster = part.nodes()
site = OutsideSite("f", (), emit, nodes=[live for live in cluster if live.node.index == 0], cluster=cluster)
injector = registry.find("injectors", name)(**params)
handles = injector.changes(site)
injector.apply(site)
probes = injector.probes(site)
print("applied", flush=True)
sys.stdin.readline()
for probe in probes:
    probe.sample(emit)
for handle in reversed(handles):
    assert handle.kind != "nft_table" or not handle.is_undone()
    handle.undo()
    assert handle.is_undone()
print(json.dumps(effects))
"""


class Pod:
    """The agent of node 0 with one fault on. `undo` takes the fault back, and returns the effects that were seen."""

    def __init__(self, links: Sequence[Link], targets: Sequence[int], name: str, params: dict[str, Any]) -> None:
        given = json.dumps([[link.address for link in links], targets, name, params])
        command = links[0].namespace.enter([sys.executable, "-c", AGENT, given], Path("/"))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "applied\n"

    def undo(self) -> list[str]:
        said, _ = self._process.communicate("\n")
        assert self._process.returncode == 0
        return json.loads(said)  # type: ignore[no-any-return]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _fault(links: Sequence[Link], name: str, targets: Sequence[int] = (0,), **params: Any) -> Iterator[Pod]:
    pod = Pod(links, targets, name, params)
    try:
        yield pod
    finally:
        pod.end()
    assert "torchaos" not in links[0].namespace.run(["nft", "list", "tables"])


def _answers(sender: socket.socket, receiver: socket.socket, wait_s: float) -> bool:
    sender.sendall(b"x")
    receiver.settimeout(wait_s)
    try:
        return bool(receiver.recv(1 << 16))
    except TimeoutError:
        return False


@pytest.mark.needs("nft")
@pytest.mark.parametrize("direction", ["both", "out", "in"])
def test_a_pod_is_cut_off_and_back(links: list[Link], connection: Any, direction: str) -> None:
    """The pod drops what it sends, what it receives, or both; the other way stays open; the kernel's counter proves it;
    and after the undo no table is left."""
    ours, theirs = connection
    with _fault(links, "network.partition", direction=direction) as pod:
        assert _answers(theirs, ours, 5.0 if direction == "out" else 0.5) == (direction == "out")
        assert _answers(ours, theirs, 5.0 if direction == "in" else 0.5) == (direction == "in")
        assert "dropped" in pod.undo()[0]
    assert _answers(ours, theirs, 20)


@pytest.mark.needs("nft")
def test_pods_on_one_side_of_a_cut_reach_each_other(links: list[Link], connection: Any) -> None:
    """If a fault cuts nodes 0 and 1 off, node 0 drops nothing of node 1; the agent of node 1 does its own part."""
    ours, theirs = connection
    with _fault(links, "network.partition", targets=(0, 1)) as pod:
        assert _answers(ours, theirs, 20)
        assert pod.undo() == []


@pytest.mark.needs("nft")
def test_a_cut_of_addresses_of_both_versions_loads(links: list[Link]) -> None:
    """Pods may have IPv4 or IPv6 addresses: the kernel takes the rules for both."""
    here, elsewhere = NetworkNamespace(0, 0), NetworkNamespace(-1, 0)
    made = [
        Link(namespace, namespace, "eth0", "eth0", address, "n", "/etc/hosts", "run")
        for namespace, address in ((here, "10.0.0.1"), (elsewhere, "10.0.0.2"), (elsewhere, "fd00::2"))
    ]
    (script,) = PacketDrop("f", made[:1], made[1:], ports=[7], percent=50.0).scripts().values()
    links[2].namespace.run(["nft", "--check", "-f", "-"], script)
    assert script.count("ip6 ") == 4


@pytest.mark.needs("nft", "tc", "shaper")
@pytest.mark.parametrize("between_nodes", [True, False])
def test_a_pod_answers_late(links: list[Link], wire: Any, connection: Any, between_nodes: bool) -> None:
    """Each packet that the pod sends comes later, and not after the undo. The round trips of its connections to other
    nodes prove it. A late connection to anybody else, such as an object store, is no proof."""
    ours, theirs = connection
    others = links if between_nodes else [links[0], links[2]]
    with _fault(others, "network.delay", delay=0.2) as pod:
        assert min(delay for _number, delay in wire.send(5, wait_s=1.0)) >= 150
        assert all(_answers(ours, theirs, 20) for _ in range(25))  # the kernel smooths its measurement
        assert ["round trip" in effect for effect in pod.undo()] == [True] * between_nodes
    assert min(delay for _number, delay in wire.send(5, wait_s=1.0)) < 150


def test_faults_that_a_pod_can_not_prove_are_refused() -> None:
    """The kernel of the pod that sends does not see what became of its packets on the way."""
    for name in ("network.duplicate", "network.reorder", "network.corrupt"):
        assert "only the pods that receive" in str(misfit(registry.find("injectors", name), "kubernetes"))
    for name in ("network.partition", "network.loss", "network.delay", "network.bandwidth"):
        assert misfit(registry.find("injectors", name), "kubernetes") is None


def test_only_a_pod_may_change_its_own_network() -> None:
    """The network of torchaos itself is the machine's, and is left alone, unless torchaos is the agent of a pod."""
    table = NftTable(0, 0, "inet", "torchaos_x_00000000")
    permits = Permits(PLAN, "run", [Path("/run")], dict, lambda: 2)
    with pytest.raises(NotPermitted, match="network of the whole host"):
        permits.check_changes([table])
    permits.has_network = True
    permits.check_changes([table])
