"""When a network or node fault counts as felt: by the kernel's counters, never by the fault's own report."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from torchaos.harness import registry
from torchaos.harness.fault_drivers.network.links import Link, PacketDrop
from torchaos.harness.fault_drivers.network.network_faults import netem
from torchaos.harness.fault_drivers.network.packet_queue import Shape, flipped
from torchaos.harness.fault_drivers.network.traffic_counters import at_least
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.protocol.wire import FIELDS, Event, Kind
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record

PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun",), "/job", {}, 2, 2, 60.0), (), ())


def record(*said: tuple[Kind, float, dict[str, Any]]) -> Record:
    seq = count()
    events = []
    for kind, at, data in said:
        payload = {**dict.fromkeys(FIELDS[kind], None), "fault": "f", **data}
        rank = 0 if kind is Kind.STEP else None
        events.append(Event(kind, "harness", next(seq), 0.0, at, rank, rank, 1, payload))
    return Record(PLAN, tuple(events), {})


Said = tuple[Kind, float, dict[str, Any]]
APPLIED: tuple[Said, Said] = (Kind.APPLYING, 10.0, {}), (Kind.APPLIED, 10.1, {})
NOTHING: dict[str, float] = {
    "dropped": 0, "seen": 0, "resent": 0, "timeouts": 0, "resets": 0, "bad_checksums": 0, "rtt_ms": 0.2,
}  # fmt: skip
PROOFS: dict[str, dict[str, float]] = {
    "network.partition": {"dropped": 3}, "network.loss": {"dropped": 1}, "network.link_down": {"timeouts": 2},
    "network.delay": {"rtt_ms": 48.0}, "network.duplicate": {"duplicates": 4}, "network.reorder": {"out_of_order": 1},
    "network.corrupt": {"bad_checksums": 1}, "network.bandwidth": {"overlimits": 9}, "network.reset": {"resets": 2},
    "network.refuse": {"refused": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", PROOFS)
def test_felt_is_what_the_kernel_counted(name: str) -> None:
    """Each fault has its own proof, points to the event that has it, and nothing else is proof."""
    injector = registry.find("injectors", name)()
    proved = record(*APPLIED, (Kind.NETWORK, 10.5, {"counts": {**NOTHING, **PROOFS[name]}}))
    evidence = injector.felt(proved, "f")
    assert evidence is not None
    assert evidence.events == (("harness", 2),)
    silent = record(*APPLIED, (Kind.NETWORK, 10.5, {"counts": NOTHING}), (Kind.EFFECT, 10.6, {"effect": "believe me"}))
    assert injector.felt(silent, "f") is None
    assert injector.felt(proved, "another") is None


@pytest.mark.parametrize("name", ["node.kill", "node.preempt", "node.reboot"])
def test_a_dead_node_is_seen_by_the_kernel(name: str) -> None:
    """One of the processes that were hit must be seen to end; that others end proves nothing."""
    injector = registry.find("injectors", name)()
    hit = (Kind.EFFECT, 10.2, {"effect": "killed", "pids": [7, 8]})
    gone = {"pid": 7, "exit_code": -9, "node": 1}
    assert injector.felt(record(*APPLIED, hit, (Kind.NODE_EXITED, 10.3, gone)), "f") is not None
    assert injector.felt(record(*APPLIED, hit, (Kind.NODE_EXITED, 10.3, {**gone, "pid": 9})), "f") is None
    assert injector.felt(record(*APPLIED, hit), "f") is None


@pytest.mark.parametrize("name", ["node.freeze", "node.slow"])
def test_a_stopped_node_is_seen_stopped(name: str) -> None:
    """The process probe must have seen one of its ranks in state T."""
    injector = registry.find("injectors", name)()
    hit = (Kind.EFFECT, 10.2, {"effect": "stopped", "pids": [7, 8]})
    assert injector.felt(record(*APPLIED, hit, (Kind.RANK_STATE, 10.3, {"pid": 8, "state": "T"})), "f") is not None
    assert injector.felt(record(*APPLIED, hit, (Kind.RANK_STATE, 10.3, {"pid": 8, "state": "R"})), "f") is None


def test_names_that_were_not_found_are_in_the_log() -> None:
    """A failed look-up counts while the fault was on, and not before or long after."""
    injector = registry.find("injectors", "network.dns")()
    line = {"cause": "name-lookup", "line": "Name or service not known"}
    off = (Kind.ROLLED_BACK, 12.0, {"verified": True})
    assert injector.felt(record(*APPLIED, (Kind.LOG_CAUSE, 11.0, line), off), "f") is not None
    assert injector.felt(record(*APPLIED, (Kind.LOG_CAUSE, 15.0, line), off), "f") is None
    assert injector.felt(record(*APPLIED, (Kind.LOG_CAUSE, 9.0, line), off), "f") is None
    client = {"cause": "endpoint", "line": "HTTPSConnectionPool(host='s3'): ... Name or service not known"}
    assert injector.felt(record(*APPLIED, (Kind.LOG_CAUSE, 11.0, client), off), "f") is not None
    refused = {"cause": "endpoint", "line": "HTTPSConnectionPool(host='s3'): ... Connection refused"}
    assert injector.felt(record(*APPLIED, (Kind.LOG_CAUSE, 11.0, refused), off), "f") is None


def test_a_late_step_shows_that_a_link_was_down() -> None:
    """Without any counter, the first step after it must come late enough."""
    injector = registry.find("injectors", "network.link_down")(down=2.0)
    assert injector.felt(record(*APPLIED, (Kind.STEP, 12.0, {})), "f") is not None
    assert injector.felt(record(*APPLIED, (Kind.STEP, 10.5, {})), "f") is None
    assert injector.felt(record(*APPLIED), "f") is None


def test_a_proof_is_a_sentence_with_its_number() -> None:
    """Below the bound there is none."""
    proof = at_least("dropped", 2, "{n} were dropped")
    assert proof({"dropped": 3}) == "3 were dropped"
    assert proof({"dropped": 1}) is None
    assert proof({}) is None


def _only(cut: PacketDrop) -> str:
    """The one script, for the switch."""
    (script,) = cut.scripts().values()
    return script


def _link(port: str) -> Link:
    return Link(NetworkNamespace(3, 1), NetworkNamespace(2, 1), "eth0", port, "10.0.0.1", "node", "/hosts", "run")


def test_the_rules_of_a_cut() -> None:
    """Both directions or one, all protocols or TCP ports alone, everything or a share."""
    a, b = [_link("port0")], [_link("port1")]
    whole = _only(PacketDrop("f", a, b))
    assert whole.count(" drop\n") == 4
    one_way = _only(PacketDrop("f", a, b, both=False))
    assert one_way.count('iifname { "port0" }') == 2
    assert 'iifname { "port1" }' not in one_way
    assert "numgen random mod 10000 < 250 " in _only(PacketDrop("f", a, b, percent=2.5))
    ports = _only(PacketDrop("f", a, b, both=False, ports=[29400, 7]))
    assert "tcp sport { 29400, 7 }" in ports
    assert "tcp dport { 29400, 7 }" in ports
    assert "l4proto" not in ports


def test_netem_says_the_same() -> None:
    """The words for tc are those of tc-netem(8)."""
    assert netem(Shape(delay=50.0, jitter=5.0)) == ["netem", "delay", "50.0ms", "5.0ms"]
    assert netem(Shape(duplicate=2.0)) == ["netem", "delay", "0.0ms", "duplicate", "2.0%"]


def test_a_corrupted_packet_differs_in_one_bit_behind_its_header() -> None:
    """The IP header stays, so that the packet still finds its way."""
    import random

    packet = bytes([0x45]) + bytes(59)
    for seed in range(50):
        changed = flipped(packet, random.Random(seed))
        assert changed[:20] == packet[:20]
        assert sum((one ^ other).bit_count() for one, other in zip(changed, packet, strict=True)) == 1
