"""The effect of each `proxy.*` fault on a connection, the proof that it was felt, and its undo."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness import registry
from torchaos.harness.fault_drivers.proxy import Endpoint
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.host import toxiproxy
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import EventFile, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.rollback.handles import from_json, to_json

pytestmark = pytest.mark.slow


def connect(address: str, timeout_s: float = 20.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    one = socket.create_connection((host, int(port)), timeout_s)
    one.settimeout(timeout_s)
    return one


class Faulted:
    """A fault on the endpoint, as a run would apply it, with the journal that its probes write."""

    def __init__(self, folder: Path, endpoint: Endpoint, inject: str, **params: Any) -> None:
        self._folder = folder / "events"
        self._folder.mkdir()
        self._file = EventFile(self._folder / "harness.jsonl", "harness")
        self.emit = self._file.emit
        self.site = OutsideSite("a-fault", (), self.emit, endpoints={"echo": endpoint})
        self.injector = registry.find("injectors", inject)(endpoint="echo", **params)
        self.handles = self.injector.changes(self.site)
        assert all(handle.is_undone() for handle in self.handles)
        self.emit(Kind.APPLYING, {"fault": "a-fault", "phase": None, "global_step": None, "pid": None})
        self.injector.apply(self.site)
        self.probes = self.injector.probes(self.site)  # as a run does it: when the fault is on
        assert not any(handle.is_undone() for handle in self.handles)

    def held(self, work: Callable[..., Any], *given: Any) -> Any:
        """Does the work, and looks meanwhile as a run does. The result of the work."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work, *given)
            while not done.done():
                self.look()
            return done.result()

    def look(self) -> None:
        for probe in self.probes:
            probe.sample(self.emit)

    def felt(self) -> str | None:
        self.look()
        events = tuple(read_events(self._folder))
        record: Any = type("R", (), {
            "events": events,
            "of_fault": lambda _, fault, *kinds: (e for e in events if e.kind in kinds and e.data["fault"] == fault),
            "of_kind": lambda _, *kinds: (e for e in events if e.kind in kinds),
        })()  # fmt: skip
        found = self.injector.felt(record, "a-fault")
        return found.what if found else None

    def undo(self) -> None:
        for handle in self.handles:
            again = from_json(json.loads(json.dumps(to_json(handle))))
            again.undo()
            assert again.is_undone()


@pytest.fixture
def faulted(tmp_path: Path, endpoint: Endpoint) -> Callable[..., Faulted]:
    return lambda inject, **params: Faulted(tmp_path, endpoint, inject, **params)


def round_trip_s(one: socket.socket, size: int = 100) -> float:
    before, got = time.monotonic(), 0
    one.sendall(b"x" * size)
    while got < size:
        data = one.recv(1 << 16)
        assert data, "the connection was closed"
        got += len(data)
    return time.monotonic() - before


def test_latency(endpoint: Endpoint, faulted: Any) -> None:
    """On a connection that stands, what is sent each way comes as late as was asked, and the time for which the proxy
    held it is the evidence; once it is taken back, the connection is as quick as before."""
    with connect(endpoint.listen) as one:
        assert round_trip_s(one) < 0.15
        fault = faulted("proxy.latency", latency=0.2)
        assert fault.felt() is None
        assert fault.held(round_trip_s, one) >= 0.4
        assert re.fullmatch(r"what the job (sent|got) was held back for at least 1\d\d ms", fault.felt())
        fault.undo()
        assert round_trip_s(one) < 0.15


def test_bandwidth_of_one_direction(endpoint: Endpoint, faulted: Any) -> None:
    """200 KB at 100 KB/s take two seconds; what comes back is evidence of nothing in the other direction."""
    with connect(endpoint.listen) as one:
        fault = faulted("proxy.bandwidth", rate=100.0, stream="downstream")
        assert fault.held(round_trip_s, one, 200_000) > 1.6
        found = re.fullmatch(
            r"what the job got had to wait, for at least (\d+) ms, and passed at ([\d.]+) KB/s", fault.felt()
        )
        assert found
        assert (float(found[1]) >= 100, float(found[2]) <= 200) == (True, True)
        fault.undo()


def test_slices(endpoint: Endpoint, faulted: Any) -> None:
    """100 bytes in slices of ten with 50 ms between them come late, and whole."""
    with connect(endpoint.listen) as one:
        fault = faulted("proxy.slicer", size=10, delay=0.05, stream="upstream")
        assert round_trip_s(one) > 0.3
        assert re.fullmatch(
            r"each piece of what the job sent was divided into \d+, of 1\d bytes on average", fault.felt()
        )
        fault.undo()


@pytest.mark.parametrize(
    ("inject", "params"),
    [
        ("proxy.latency", {"latency": 5.0, "stream": "upstream"}), ("proxy.bandwidth", {"rate": 1e6}),
        ("proxy.slicer", {"size": 1 << 20}), ("proxy.slow_close", {"delay": 20.0}),
    ],
)  # fmt: skip
def test_traffic_alone_is_no_evidence(endpoint: Endpoint, faulted: Any, inject: str, params: Any) -> None:
    """Bytes went through the proxy, and connections began and ended, but the fault's own effect was not seen: it came
    the other way, or the job had not yet met it."""
    fault = faulted(inject, **params)
    for handle in fault.handles:
        handle.undo()  # so that the proxy has no toxic
    with connect(endpoint.listen) as one:
        for _ in range(2):
            fault.held(round_trip_s, one, 20_000)
    assert fault.felt() is None


def test_timeout(endpoint: Endpoint, faulted: Any) -> None:
    """What is sent is not answered, and that it is not is the evidence; a connection made afterwards is answered."""
    with connect(endpoint.listen, 0.5) as one:
        fault = faulted("proxy.timeout")
        one.sendall(b"x" * 50)
        with pytest.raises(TimeoutError):
            one.recv(1)
        assert fault.felt() == "the job sent 50 bytes to the proxy, and got none back"
    fault.undo()
    with connect(endpoint.listen) as one:
        assert round_trip_s(one) < 0.15


@pytest.mark.parametrize(
    ("inject", "params"),
    [("proxy.reset_peer", {}), ("proxy.limit_data", {"bytes": 40}), ("proxy.timeout", {"after": 3.0})],
)
def test_connections_end(endpoint: Endpoint, faulted: Any, inject: str, params: Any) -> None:
    """The connection ends, the kernel says so, and a connection made after it is taken back is answered in full."""
    with connect(endpoint.listen) as one:
        round_trip_s(one)
        fault = faulted(inject, **params)
        with suppress(OSError):
            one.sendall(b"x" * 100)
            while one.recv(1 << 16):
                pass
    assert fault.felt() == "1 connections of the job to the proxy ended"
    fault.undo()
    with connect(endpoint.listen) as one:
        round_trip_s(one)


def test_slow_close(endpoint: Endpoint, faulted: Any) -> None:
    """That the other side has closed is heard of as late as was asked; how long the connection was still open is the
    evidence."""
    with connect(endpoint.listen) as one:
        round_trip_s(one)
        fault = faulted("proxy.slow_close", delay=3.0)  # long enough for a busy machine to see it
        one.shutdown(socket.SHUT_WR)
        before = time.monotonic()
        assert fault.felt() is None
        fault.held(one.recv, 1)
        assert time.monotonic() - before > 2.9
    assert fault.felt().startswith("a connection of the job was still open ")
    fault.undo()


def test_down(endpoint: Endpoint, faulted: Any) -> None:
    """Open connections end, new ones are refused, and come through again afterwards."""
    with connect(endpoint.listen) as one:
        round_trip_s(one)
        fault = faulted("proxy.down")
        with suppress(OSError):
            assert one.recv(1) == b""
    assert fault.felt() == "1 connections of the job to the proxy ended"
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint.listen)
    fault.undo()
    with connect(endpoint.listen) as one:
        round_trip_s(one)


def test_the_log_names_the_proxy(endpoint: Endpoint, faulted: Any) -> None:
    """Where no connection stood when it went down, a line of the job's log that names the proxy's address is evidence;
    one about another address is none."""
    fault = faulted("proxy.down")
    assert fault.felt() is None
    line = 'Could not connect to the endpoint URL: "http://{}/checkpoints"'
    fault.emit(Kind.LOG_CAUSE, {"cause": "endpoint", "line": line.format("127.0.0.1:1")})
    assert fault.felt() is None
    fault.emit(Kind.LOG_CAUSE, {"cause": "endpoint", "line": line.format(endpoint.listen)})
    assert fault.felt().startswith("the job could not use it: Could not connect")
    fault.undo()


def test_a_server_that_hangs_is_told_of(endpoint: Endpoint, faulted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server does not answer, applying and taking back raise, and nothing claims to be undone; a server that
    is gone has taken its faults along."""
    fault = faulted("proxy.latency", latency=0.2)
    monkeypatch.setattr(toxiproxy, "ASK_S", 2.0)
    os.kill(endpoint.api.pid, signal.SIGSTOP)
    for ask in (lambda: fault.injector.apply(fault.site), fault.handles[0].undo, fault.handles[0].is_undone):
        with pytest.raises(TimeoutError, match="did not answer within 2 s"):
            ask()
    os.kill(endpoint.api.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not fault.handles[0].is_undone():
        assert time.monotonic() < deadline, "the server was killed, and its toxic is still there"
    with pytest.raises(ProcessLookupError, match="is gone"):
        fault.injector.apply(fault.site)


def test_an_unknown_endpoint(endpoint: Endpoint, faulted: Any) -> None:
    """A fault on an endpoint without a proxy says which."""
    injector = registry.find("injectors", "proxy.down")(endpoint="other")
    with pytest.raises(ChaosError, match=r"no proxy in front of other; name it in job\.endpoints"):
        injector.changes(OutsideSite("a-fault", (), lambda *a, **k: None, endpoints={"echo": endpoint}))  # type: ignore[arg-type]
