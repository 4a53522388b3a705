"""The effect of each fault on packets between nodes: measured by a probe connection, and counted by the kernel."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from torchaos.harness.fault_drivers.network.links import Link, PacketDrop, counts
from torchaos.harness.fault_drivers.network.network_faults import Shaper
from torchaos.harness.fault_drivers.network.packet_queue import Shape
from torchaos.harness.fault_drivers.network.traffic_counters import measured, meter_handle, read, round_trips
from torchaos.harness.interfaces import Handle
from torchaos.harness.rollback.handles import from_json, to_json

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def undo() -> Iterator[Callable[..., None]]:
    """Take handles back as the reaper would: in reverse, from JSON, verified. What is left is taken back at last."""
    noted: list[Handle] = []

    def heal(*handles: Handle) -> None:
        noted.extend(handles)
        for handle in reversed(handles):
            again = from_json(json.loads(json.dumps(to_json(handle))))
            again.undo()
            assert again.is_undone(), handle

    yield heal
    for handle in reversed(noted):
        handle.undo()


def _answers(ends: Ends, wait_s: float) -> bool:
    """Whether what one end sends reaches the other within this time."""
    ours, theirs = ends
    ours.sendall(b"x")
    theirs.settimeout(wait_s)
    try:
        return bool(theirs.recv(1 << 16))
    except TimeoutError:
        return False


@pytest.mark.needs("links", "nft")
def test_a_partition_drops_and_heals(links: list[Link], connection: Ends, undo: Any) -> None:
    """An established connection is silent while the nodes are cut apart, its packets are counted as dropped, and what
    was sent meanwhile comes after the cut is taken back."""
    assert _answers(connection, 20)
    cut = PacketDrop("apart", [links[0]], [links[1], links[2]])
    assert cut.handles[0].is_undone()
    cut.apply()
    assert not cut.handles[0].is_undone()
    assert not _answers(connection, 0.6)
    assert counts(*cut.handles)["dropped"] >= 1
    assert read(links)["resent"] >= 1
    undo(*cut.handles)
    assert _answers(connection, 20)
    assert counts(*cut.handles) == {}


@pytest.mark.needs("links", "nft")
def test_a_one_way_cut(links: list[Link], wire: Any, undo: Any) -> None:
    """What node 1 sends is lost, and what node 0 sends comes."""
    wire.send(1)  # the neighbour is known: its answer to who it is would be lost, too
    cut = PacketDrop("one-way", [links[1]], [links[0]], both=False)
    cut.apply()
    assert len(wire.send(20)) == 20
    undo(*cut.handles)


@pytest.mark.needs("links", "nft")
def test_only_some_ports_are_cut(links: list[Link], connection: Ends, wire: Any, undo: Any) -> None:
    """A connection to the port is cut; everything else goes through."""
    port = connection[1].getsockname()[1]
    cut = PacketDrop("port", [links[1]], [links[0]], ports=[port])
    cut.apply()
    assert not _answers(connection, 0.3)
    assert len(wire.send(20)) == 20
    undo(*cut.handles)
    assert _answers(connection, 20)


@pytest.mark.needs("links", "nft")
def test_loss_is_what_was_asked_for(links: list[Link], wire: Any, undo: Any) -> None:
    """Of 2,000 datagrams 20 %, give or take 4 points (4.5 standard deviations), do not come."""
    cut = PacketDrop("loss", [links[0]], [links[1]], percent=20)
    cut.apply()
    came = len(wire.send(2000, gap_s=0.0002))
    undo(*cut.handles)
    assert 1 - came / 2000 == pytest.approx(0.2, abs=0.04)


@pytest.mark.needs("links", "shaper")
def test_delay_is_what_was_asked_for(links: list[Link], wire: Any, undo: Any) -> None:
    """Asked for 30 ms no packet comes earlier, and whenever the machine has time for it, they come within 1 ms of it;
    afterwards the delay is gone."""
    shaper = Shaper("delay", links[0], Shape(delay=30.0))
    shaper.apply()
    assert not all(handle.is_undone() for handle in shaper.handles())
    delays = [delay for _, delay in wire.send(100, gap_s=0.005)]
    undo(*shaper.handles())
    assert len(delays) == 100
    assert min(delays) >= 29.9
    assert sorted(delays)[10] == pytest.approx(30.0, abs=1.0)
    assert min(delay for _, delay in wire.send(20)) < 5.0


@pytest.mark.needs("links", "shaper")
def test_jitter_changes_no_order(links: list[Link], wire: Any, undo: Any) -> None:
    """Packets come with different delays, in the order in which they were sent."""
    shaper = Shaper("jitter", links[0], Shape(delay=10.0, jitter=5.0))
    shaper.apply()
    came = wire.send(200, gap_s=0.001)
    undo(*shaper.handles())
    assert [number for number, _ in came] == list(range(200))
    assert statistics.pstdev(delay for _, delay in came) > 0.5


@pytest.mark.needs("links", "shaper")
def test_some_overtake_the_others(links: list[Link], wire: Any, undo: Any) -> None:
    """All come, and not in the order in which they were sent."""
    shaper = Shaper("reorder", links[0], Shape(delay=10.0, reorder=25.0))
    shaper.apply()
    numbers = [number for number, _ in wire.send(200, gap_s=0.001)]
    undo(*shaper.handles())
    assert sorted(numbers) == list(range(200))
    assert numbers != sorted(numbers)


@pytest.mark.needs("links", "shaper")
def test_some_come_twice(links: list[Link], wire: Any, undo: Any) -> None:
    """Every number comes, and a fifth of them, give or take, a second time."""
    shaper = Shaper("twice", links[0], Shape(duplicate=20.0))
    shaper.apply()
    numbers = [number for number, _ in wire.send(300, gap_s=0.001)]
    undo(*shaper.handles())
    assert set(numbers) == set(range(300))
    assert 20 < len(numbers) - 300 < 120


@pytest.mark.needs("links", "shaper")
def test_a_damaged_packet_never_gets_through(links: list[Link], connection: Ends, undo: Any) -> None:
    """Half of all packets have a flipped bit: the receiving kernel counts bad checksums, and every byte comes as it was
    sent."""
    before = read([links[1]])["bad_checksums"]
    shaper = Shaper("corrupt", links[0], Shape(corrupt=50.0))
    shaper.apply()
    ours, theirs = connection
    ours.settimeout(60)
    theirs.settimeout(60)
    sent = bytes(range(256)) * 40
    thread = threading.Thread(target=ours.sendall, args=(sent,))
    thread.start()
    got = b""
    while len(got) < len(sent):
        got += theirs.recv(1 << 16)
    thread.join()
    undo(*shaper.handles())
    assert got == sent
    assert read([links[1]])["bad_checksums"] > before


@pytest.mark.needs("links", "shaper", "ss")
def test_round_trips_of_connections_show_a_delay(links: list[Link], connection: Ends, undo: Any) -> None:
    """TCP_INFO of an ordinary connection has the delay, without any probe of ours on it."""
    assert _answers(connection, 20)
    assert round_trips(links[0])["rtt_ms"] < 15.0
    shaper = Shaper("trips", links[0], Shape(delay=60.0))
    shaper.apply()
    for _ in range(12):
        assert _answers(connection, 20)
    seen = round_trips(links[0])["rtt_ms"]
    undo(*shaper.handles())
    assert seen > 20.0


@pytest.mark.needs("links", "shaper")
def test_packets_pass_when_the_queue_is_killed(links: list[Link], wire: Any, undo: Any) -> None:
    """Where delay is a process's work and that process dies, the fault is over, and nothing is lost."""
    shaper = Shaper("killed", links[0], Shape(delay=200.0))
    shaper.apply()
    if shaper.handles()[1].is_undone():
        undo(*shaper.handles())
        pytest.skip("this kernel has netem, so that there is no queue")
    shaper.handles()[1].undo()
    assert [number for number, _ in wire.send(20)] == list(range(20))
    undo(*shaper.handles())


@pytest.mark.needs("links", "ss")
def test_reset_ends_a_connection(links: list[Link], connection: Ends) -> None:
    """Both ends of an established connection see an error at once, and the kernel counts it."""
    before = read(links)["resets"]
    links[0].namespace.run(["ss", "-K", "-tnHO", "state", "established", f"( dst {links[1].address} )"])
    assert read(links)["resets"] > before
    with pytest.raises(OSError, match=r"abort|reset|pipe"):
        connection[0].sendall(b"x")
    connection[1].settimeout(20)
    with pytest.raises(ConnectionResetError):
        connection[1].recv(1)


def test_tools_say_what_is_wrong(links: list[Link]) -> None:
    """A tool that fails is an OSError with the tool's own words; one in a namespace that is gone, too."""
    with pytest.raises(OSError, match="Cannot find device"):
        links[0].namespace.run(["ip", "link", "set", "dev", "nosuch", "up"])
    process = subprocess.Popen(["true"])
    namespace = type(links[0].namespace)(process.pid, 1)
    process.wait()
    with pytest.raises(ProcessLookupError, match="is gone"):
        namespace.run(["true"])


class _Site:
    """As much of a site as a meter needs: the first node is the target."""

    def __init__(self, links: list[Link]) -> None:
        live = [SimpleNamespace(node=SimpleNamespace(index=index, link=link)) for index, link in enumerate(links)]
        self.fault, self.nodes, self.cluster = "metered", live[:1], live


def _metered(links: list[Link], asked: dict[str, float], datagrams: int, jitter_ms: float = 0.0) -> dict[str, float]:
    """What the meter says once it has sent so many."""
    site: Any = _Site(links)
    (probe,) = measured(site, asked, jitter_ms=jitter_ms)
    told: list[dict[str, Any]] = []
    end = time.monotonic() + 60
    try:
        while not told or told[-1]["datagrams"] < datagrams:
            assert time.monotonic() < end, f"the meter said {told[-1:]}, and its exit code is {probe.process.poll()}"
            probe.sample(lambda kind, data: told.append(dict(data)))  # type: ignore[arg-type, return-value]
            time.sleep(0.05)
    finally:
        meter_handle(site).undo()
        probe.process.wait()
        probe.process.stdout.close()  # type: ignore[union-attr]
    assert meter_handle(site).is_undone()
    return told[-1]["measured"]  # type: ignore[no-any-return]


@pytest.mark.needs("links", "shaper")
def test_the_meter_sees_a_delay(links: list[Link], undo: Any) -> None:
    """Of 25 ms that were asked for the meter's median is within a millisecond on a quiet machine, and never below; what
    was not asked for it does not say, and its datagrams are no TCP of the job's."""
    before = read(links)
    shaper = Shaper("metered", links[0], Shape(delay=25.0))
    shaper.apply()
    said = _metered(links, {"delay_ms": 25.0, "loss_percent": 0.0}, 300)
    undo(*shaper.handles())
    assert said.keys() == {"delay_ms", "loss_percent"}
    assert 24.9 <= said["delay_ms"] < 30.0
    assert said["loss_percent"] == pytest.approx(0.0, abs=0.5)
    assert _metered(links, {"delay_ms": 0.0}, 100)["delay_ms"] < 5.0
    assert read(links) == before


@pytest.mark.needs("links", "nft")
def test_the_meter_sees_loss(links: list[Link], undo: Any) -> None:
    """Of a fifth that is to be lost it counts a fifth, give or take 4 points, and all of it when all is dropped."""
    for percent in (20.0, 100.0):
        cut = PacketDrop("metered", [links[0]], [links[1]], percent=percent)
        cut.apply()
        assert _metered(links, {"loss_percent": percent}, 1000)["loss_percent"] == pytest.approx(percent, abs=4.0)
        undo(*cut.handles)


@pytest.mark.needs("links", "shaper")
def test_jitter_does_not_bias_the_meter(links: list[Link], undo: Any) -> None:
    """Packets stay in order, so that of a dense stream each waits for the latest before it; the meter's are far enough
    apart, and its median is what was asked for."""
    shaper = Shaper("metered", links[0], Shape(delay=25.0, jitter=5.0))
    shaper.apply()
    said = _metered(links, {"delay_ms": 25.0}, 150, jitter_ms=5.0)
    undo(*shaper.handles())
    assert said["delay_ms"] == pytest.approx(25.0, abs=2.5)
