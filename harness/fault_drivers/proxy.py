"""Faults of an endpoint that the job reaches by its address, such as an object store or a rendezvous. A Toxiproxy
server stands in front of the endpoint. The mark of its process is in the undo log before the server starts. Toxics are
Toxiproxy's own, see "Toxics" in its README; their times are in ms, their rates in KB/s.

The job's traffic through a proxy is measured from the kernel's data about the proxy's connections (TCP_INFO, as shown
by ss). Bytes are *held back* if the proxy has got them from one side and not sent them to the other. If a later look
shows that none of these bytes was sent meanwhile, they were held back for at least the time between the looks. So a
measured time may be too short, but never too long."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.fault_drivers.network.traffic_counters import Watch, logged
from torchaos.harness.host import processes
from torchaos.harness.host.toxiproxy import Api
from torchaos.harness.interfaces import ChaosError, Evidence, Handle, Hits, NodeSite, Probe, Where
from torchaos.harness.protocol.wire import ENV_RUN_ID, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.network_handles import Toxic, mark_of

PROGRAM = "toxiproxy-server"
START_S = 20.0  # seconds


@dataclass(frozen=True)
class Endpoint:
    """An address that the job uses. The real server is at `upstream`. The job gets the address `listen` of the proxy
    instead. Both are host:port."""

    name: str
    upstream: str
    listen: str
    api: Api


def mark_of_server(run_id: str) -> str:
    """The mark of the server's process. It differs from the job's mark, because the job is ended before the server."""
    return f"{run_id}.proxy"


def start_toxiproxy(upstreams: Mapping[str, str], run_id: str, folder: Path, link: Link | None) -> dict[str, Endpoint]:
    """Starts the server in the network of a node or, if `link` is None, on this machine's loopback interface. Raises
    ChaosError if the server does not answer; then its process has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    host = link.address if link else "127.0.0.1"
    port, *ports = _ports(1 + len(upstreams)) if link is None else range(18474, 18475 + len(upstreams))
    listens = {name: f"{host}:{number}" for name, number in zip(upstreams, ports, strict=True)}
    config = [{"name": n, "upstream": upstreams[n], "listen": listens[n], "enabled": True} for n in upstreams]
    (folder / "proxies.json").write_text(json.dumps(config, indent=1))
    command = [shutil.which(PROGRAM) or PROGRAM, "-port", str(port), "-host", "127.0.0.1"]
    command += ["-config", str(folder / "proxies.json")]
    log = folder / "server.log"
    with open(log, "ab") as output:
        process = subprocess.Popen(
            link.namespace.enter(command, folder) if link else command, cwd=folder, start_new_session=True,
            env={**os.environ, ENV_RUN_ID: mark_of_server(run_id)}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output,
        )  # fmt: skip
    api = Api(process.pid, processes.ticks_of(process.pid), port)
    try:
        _await(api, process, set(upstreams), link, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return {name: Endpoint(name, upstreams[name], listens[name], api) for name in upstreams}


def _await(api: Api, process: subprocess.Popen[bytes], names: set[str], link: Link | None, log: Path) -> None:
    """Waits until the server reports that all proxies are up. Raises ChaosError, with the last answer of the server, if
    it does not."""
    end, state = time.monotonic() + START_S, "nothing"
    while time.monotonic() < end:
        if process.poll() is not None:
            state = f"it ended with exit code {process.returncode}"
            break
        try:
            if link is None or os.path.samefile(f"/proc/{process.pid}/ns/net", f"/proc/{link.namespace.pid}/ns/net"):
                proxies = api.ask()
                if names <= {name for name, proxy in proxies.items() if proxy["enabled"]}:
                    return
                state = f"its proxies are {dict(proxies)}"
        except OSError as error:
            state = str(error)
        time.sleep(0.02)
    raise ChaosError(f"the proxies could not be put in front of the job's endpoints: {state}; see {log}")


def _ports(count: int) -> list[int]:
    """Free ports. If another process takes a port before the server starts, the server fails, and the run is not
    started."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return numbers


_INFO = re.compile(r"\b(bytes_received|bytes_sent|data_segs_in|data_segs_out):(\d+)")
_LOOK_S = 0.3  # while bytes are held back, the connections are looked at repeatedly for this time
WAYS = {"upstream": "sent", "downstream": "got"}  # as the job sees it


@dataclass(frozen=True)
class _Look:
    """The open connections of a proxy at one time: the kernel's counters, by the address of the job (`job`) or by the
    proxy's own address (`upstream`). A connection counts as open until the proxy or the endpoint closes it."""

    begun_s: float  # CLOCK_MONOTONIC
    ended_s: float
    job: Mapping[str, Mapping[str, int]]
    upstream: Mapping[str, Mapping[str, int]]

    def bytes_of(self, way: str) -> tuple[int, int]:
        """How many bytes the proxy has got in this direction, and how many of them it has sent on."""
        into, out = (self.job, self.upstream) if way == "sent" else (self.upstream, self.job)
        return sum(one["bytes_received"] for one in into.values()), sum(one["bytes_sent"] for one in out.values())


@dataclass(frozen=True)
class _Mark:
    look: _Look
    got: int
    sent: int


class Traffic:
    """The counts of an endpoint, since this object was made. A call returns: `sent_bytes` and `got_bytes` of the job;
    `unanswered` (bytes sent, if none came back); `connections` seen, and how many of them `ended`; `half_closed_ms`,
    how long a connection of the job stayed open after the endpoint had closed it.

    These are given for each direction, `sent` and `got` by the job: `held_*_ms`, the longest time for which bytes were
    certainly held back, and `held_*_kbs`, the rate at which bytes passed in that time; `pieces_*`, into how many pieces
    the proxy divided each segment, and `piece_*_bytes`, the mean size of these pieces.

    Only the job knows the proxy's port, so all connections are the job's. A connection that begins and ends between two
    calls is not seen."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        look = _look(endpoint)
        self._first, self._last = (look.job, look.upstream), (dict(look.job), dict(look.upstream))
        self._ended = 0
        self._before = look
        self._marks: dict[str, _Mark] = {}
        self._held: dict[str, tuple[float, float]] = {}  # by way: seconds, bytes per second
        self._half_closed_since_s: float | None = None
        self._half_closed_s = 0.0

    def __call__(self) -> dict[str, float]:
        look = self._take(_look(self._endpoint))
        end_s = look.begun_s + _LOOK_S
        while any(got > sent for got, sent in map(look.bytes_of, WAYS.values())) and time.monotonic() < end_s:
            look = self._take(_look(self._endpoint))
        counts: dict[str, float] = {
            "connections": len(self._last[0]), "ended": self._ended,
            "sent_bytes": self._grown(0, "bytes_received"), "got_bytes": self._grown(0, "bytes_sent"),
            "half_closed_ms": round(1e3 * self._half_closed_s),
        }  # fmt: skip
        counts["unanswered"] = counts["sent_bytes"] if not counts["got_bytes"] else 0
        for number, way in enumerate(WAYS.values()):
            held_s, rate = self._held.get(way, (0.0, 0.0))
            counts |= {f"held_{way}_ms": round(1e3 * held_s), f"held_{way}_kbs": round(rate / 1e3, 1)}
            came, left = self._grown(number, "data_segs_in"), self._grown(1 - number, "data_segs_out")
            if came and left:
                size = self._grown(1 - number, "bytes_sent") / left
                counts |= {f"pieces_{way}": round(left / came, 2), f"piece_{way}_bytes": round(size, 1)}
        return counts

    def _grown(self, side: int, name: str) -> int:
        """The growth of a counter on the job's side (0) or on the endpoint's side (1), in all connections."""
        first = self._first[side]
        return sum(max(0, one[name] - first.get(at, {}).get(name, 0)) for at, one in self._last[side].items())

    def _take(self, look: _Look) -> _Look:
        self._ended += len(self._before.job.keys() - look.job.keys())
        same = (look.job.keys(), look.upstream.keys()) == (self._before.job.keys(), self._before.upstream.keys())
        self._before = look
        for last, now in zip(self._last, (look.job, look.upstream), strict=True):
            last.update(now)
        if not same or len(look.job) != len(look.upstream):
            self._marks = {}  # a connection has begun or ended, so the sums can't be compared with earlier ones
        if len(look.job) <= len(look.upstream):
            self._half_closed_since_s = None
        elif self._half_closed_since_s is None:
            self._half_closed_since_s = look.ended_s
        else:
            self._half_closed_s = max(self._half_closed_s, look.begun_s - self._half_closed_since_s)
        if len(look.job) == len(look.upstream):
            for way in WAYS.values():
                self._weigh(way, look)
        return look

    def _weigh(self, way: str, look: _Look) -> None:
        got, sent = look.bytes_of(way)
        mark = self._marks.get(way)
        if mark is None or sent >= mark.got:
            self._marks[way] = _Mark(look, got, sent)
            return
        held_s = look.begun_s - mark.look.ended_s
        if held_s > self._held.get(way, (0.0, 0.0))[0]:
            self._held[way] = held_s, (sent - mark.sent) / held_s


def connections(endpoint: Endpoint) -> Mapping[str, Mapping[str, int]]:
    """The open connections of the job to the proxy: the kernel's counters, by the address of the job."""
    return _look(endpoint).job


def _look(endpoint: Endpoint) -> _Look:
    listen, target = (address.rpartition(":")[2] for address in (endpoint.listen, endpoint.upstream))
    begun_s = time.monotonic()
    only = f"( sport = :{listen} or dport = :{target} )"
    try:
        output = endpoint.api.run(["ss", "-tinpHO", "state", "established", "state", "close-wait", only])
    except OSError:  # the server is gone, and with it its connections
        output = ""
    job: dict[str, Mapping[str, int]] = {}
    upstream: dict[str, Mapping[str, int]] = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) < 5:
            continue
        state, (own, peer) = words[0], words[3:5]
        found = {name: int(number) for name, number in _INFO.findall(line)}
        info = {name: found.get(name, 0) for name in ("bytes_received", "bytes_sent", "data_segs_in", "data_segs_out")}
        if own.endswith(f":{listen}"):
            job[peer] = info
        elif state == "ESTAB" and f"pid={endpoint.api.pid}," in line:  # another process may use the endpoint directly
            upstream[own] = info
    return _Look(begun_s, time.monotonic(), job, upstream)


BOTH = ("upstream", "downstream")
_WORDS = {
    "unanswered": "the job sent {n} bytes to the proxy, and got none back",
    "ended": "{n} connections of the job to the proxy ended",
}


class ProxyFault(Fault):
    """Adds a toxic to the proxy of one of the job's endpoints. A class without a toxic disables the proxy."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "endpoints"
    needs: ClassVar[frozenset[str]] = frozenset({"toxiproxy", "ss"})
    toxic: ClassVar[str] = ""  # the toxic's type; empty: the proxy is disabled
    proofs: ClassVar[tuple[str, ...]] = ()  # names of counts of `Traffic`; each of them alone is a proof

    endpoint: str

    if TYPE_CHECKING:  # a parameter in some injectors, a constant in others

        @property
        def stream(self) -> str: ...  # upstream: data that the job sends; downstream: data that it gets; both

    def attributes(self) -> Mapping[str, Any]:
        """The attributes of the toxic, in Toxiproxy's units (ms, KB/s)."""
        return {}

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        endpoint = self._endpoint(site)
        mark, down = mark_of(site.fault), not self.toxic
        return [Toxic(endpoint.api.pid, endpoint.api.start_ticks, endpoint.api.port, endpoint.name, mark, down)]

    def apply(self, site: NodeSite) -> None:
        """Sends the order to the server. Raises OSError if the server does not answer, ChaosError if it did not carry
        out the order."""
        endpoint, mark = self._endpoint(site), mark_of(site.fault)
        streams = (BOTH if self.stream == "both" else (self.stream,)) if self.toxic else ()
        toxics = [
            {"type": self.toxic, "name": f"{mark}_{stream}", "stream": stream, "attributes": dict(self.attributes())}
            for stream in streams
        ]
        before = connections(endpoint)
        order: dict[str, object] = {"add": toxics} if toxics else {"enabled": False}
        answer = endpoint.api.ask(proxy=endpoint.name, **order).get(endpoint.name, {})
        added = {toxic["name"] for toxic in toxics} <= {*answer.get("toxics", ())}
        if not added or answer.get("enabled") is not bool(toxics):
            raise ChaosError(f"Toxiproxy did not carry out the order for {endpoint.name}: it answered {answer}")
        effect = f"{endpoint.name} is reached by {endpoint.listen}"
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect, "at": endpoint.listen})
        if not toxics and (ended := len(before.keys() - connections(endpoint).keys())):
            site.emit(Kind.NETWORK, {"fault": site.fault, "counts": {"ended": ended}})

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [Watch(site.fault, (), self._proof, [Traffic(self._endpoint(site))])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence from the kernel's counters of the proxy's connections while the fault was on: an effect of about the
        requested size. If the fault breaks connections, a line in the job's log that says that the proxy's address
        could not be used is evidence, too."""
        for event in record.of_fault(fault, Kind.NETWORK):
            if words := self._proof(event.data["counts"]):
                return Evidence.of(words, event)
        if "ended" not in self.proofs:
            return None
        addresses = [str(event.data["at"]) for event in record.of_fault(fault, Kind.EFFECT) if "at" in event.data]
        return logged(record, fault, "endpoint", "the job could not use it", addresses)

    def effect(self, way: str, counts: Mapping[str, float]) -> str | None:
        """A sentence, if the counts of `Traffic` show the fault's effect on the data that the job `sent` or `got`
        (`way`). Otherwise None."""
        return None

    def _proof(self, counts: Mapping[str, float]) -> str | None:
        named = next(
            (_WORDS[name].format(n=f"{counts[name]:g}") for name in self.proofs if counts.get(name, 0) >= 1), None
        )
        ways = (way for stream, way in WAYS.items() if self.stream in (stream, "both"))
        return named or next((words for way in ways if (words := self.effect(way, counts))), None)

    def _endpoint(self, site: NodeSite) -> Endpoint:
        endpoints: Mapping[str, Endpoint] = site.endpoints
        try:
            return endpoints[self.endpoint]
        except KeyError as error:
            raise ChaosError(f"there is no proxy in front of {self.endpoint}; name it in job.endpoints") from error
