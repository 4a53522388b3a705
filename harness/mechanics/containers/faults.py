"""What is done to a node's container through the engine, and what the engine tells of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import ChaosError, Emit, Evidence, LiveNode, NodeSite
from torchaos.harness.machine.docker_engine import EngineError, container_of, engine, events
from torchaos.harness.mechanics.site import TargetGone
from torchaos.harness.record.record import Record
from torchaos.harness.undo.containers import Container, limits_of

_TOLD_S = 5.0  # the engine tells of what it has done within milliseconds, on a busy machine within a second
_HOG = "head -c {bytes} /dev/zero | tail >/dev/null"  # keeps all that it reads: there is no end of line


@dataclass(frozen=True)
class Hit:
    """One container that a fault hits, and the engine that runs it."""

    client: Any
    live: LiveNode
    now: Any  # as the engine knew it before

    @property
    def id(self) -> str:
        return str(self.now["Id"])

    @property
    def network(self) -> tuple[str, str]:
        """The id of the run's network, and the name. Raises ChaosError where the container is not on it."""
        for name, one in self.now["NetworkSettings"]["Networks"].items():
            return str(one["NetworkID"]), str(name)
        raise ChaosError(f"the container of node {self.live.node.index} is on no network")


@contextmanager
def hits(nodes: Iterable[LiveNode]) -> Iterator[list[Hit]]:
    """Raises ChaosError where a node has no running container, or the engine does not answer."""
    nodes = list(nodes)
    try:
        with engine(_engine_of(nodes[0])) as client:
            found = [Hit(client, live, container_of(client, live.run_id, live.node.index)) for live in nodes]
            for one in found:
                if not one.now["State"]["Running"]:
                    raise ChaosError(f"the container of node {one.live.node.index} does not run")
            yield found
    except EngineError as error:
        raise ChaosError(str(error)) from error


def _engine_of(live: LiveNode) -> str:
    """Its address. Raises ChaosError where the node is no container."""
    node: Any = live.node
    where = getattr(node, "engine", None) or getattr(getattr(node, "inner", None), "engine", None)
    if where is None:
        raise ChaosError(f"node {live.node.index} is no container; write launcher: docker")
    return str(where)


def changes(site: NodeSite, part: Literal["running", "network", "limits"]) -> Sequence[Container]:
    """How to set right what `do` is about to change in the containers."""
    with hits(site.nodes) as found:
        return [Container(_engine_of(one.live), one.live.run_id, one.id, part, _good(one, part)) for one in found]


def _good(hit: Hit, part: str) -> Mapping[str, Any]:
    if part == "network":
        network, name = hit.network
        return {"network": network, "address": hit.now["NetworkSettings"]["Networks"][name]["IPAddress"]}
    return limits_of(hit.now) if part == "limits" else {}


def do(site: NodeSite, act: Callable[[Hit], object], action: str, last: str = "") -> None:
    """To each of the containers at once; then what the engine tells of it goes into the record. Held ranks go on when
    it has told of `action`; it is over when it has told of `last`, too. Raises ChaosError."""
    since = time.time()
    with hits(site.nodes) as found, ThreadPoolExecutor(max(1, len(found))) as pool:
        _check(site, found)
        done = [pool.submit(act, hit) for hit in found]
        told = [_tell(site, hit, one, since, action) for hit, one in zip(found, done, strict=True)]
        site.release()
        for hit, one, number in zip(found, done, told, strict=True):
            one.result()
            _tell(site, hit, one, since, last or action, number)


def _check(site: NodeSite, found: Iterable[Hit]) -> None:
    """Raises TargetGone where a container is not the one that the way back was written down for, if there is one."""
    guarded = {one.id for one in site.guarded if isinstance(one, Container)}
    for hit in found:
        if guarded and hit.id not in guarded:
            raise TargetGone(f"node {hit.live.node.index} has another container since its way back was written down")


def _tell(site: NodeSite, hit: Hit, done: Future[object], since: float, action: str, told: int = 0) -> int:
    """Every event of the container since then but for those that were told, until `action` is among them, it has
    failed, or a few seconds are over. How many have been told now."""
    end = time.monotonic() + _TOLD_S
    while time.monotonic() < end and not (done.done() and done.exception()):
        with engine(_engine_of(hit.live)) as client:  # the other is in use
            said = events(client, hit.id, since)
        for one in said[told:]:
            code = one["Actor"]["Attributes"].get("exitCode")
            more = {} if code is None else {"exit_code": int(code)}
            data = {"fault": site.fault, "node": hit.live.node.index, "action": one["Action"], **more}
            site.emit(Kind.CONTAINER, data)
        is_news = action in [one["Action"] for one in said[told:]]
        told = len(said)
        if is_news:
            effect = f"the engine says of node {hit.live.node.index}: {action}"
            site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect})
        if action in [one["Action"] for one in said]:
            break
        time.sleep(0.02)
    return told


def told(record: Record, fault: str, action: str, words: str) -> Evidence | None:
    """The engine has told of `action`, for each node that was hit."""
    found = [event for event in record.of_fault(fault, Kind.CONTAINER) if event.data["action"] == action]
    nodes = {event.data["node"] for event in found}
    wanted = {event.data.get("node") for event in record.of_fault(fault, Kind.APPLYING)}
    if not wanted or not wanted <= nodes:
        return None
    names = ", ".join(map(str, sorted(nodes)))
    return Evidence(words.format(nodes=names), tuple((event.source, event.seq) for event in found))


def limit(hit: Hit, cpus: float, memory: int) -> None:
    """`memory` in bytes; 0 for either leaves it as it is."""
    period = hit.now["HostConfig"]["CpuPeriod"] or 100_000
    cpu = {"cpu_period": period, "cpu_quota": round(cpus * period)} if cpus else {}
    most = {"mem_limit": memory, "memswap_limit": memory} if memory else {}
    hit.client.update_container(hit.id, **cpu, **most)


def fill(hit: Hit, spare: int) -> None:
    """Limit the memory to `spare` bytes more than the node uses now, and use them up."""
    stats = hit.client.stats(hit.id, stream=False, one_shot=True)["memory_stats"]
    used = int(stats["usage"]) - int(stats["stats"].get("total_inactive_file", stats["stats"].get("inactive_file", 0)))
    limit(hit, 0.0, used + spare)
    # No more than that much, so that it does no harm where the limit is taken back before it is over.
    command = ["sh", "-c", _HOG.format(bytes=used + spare)]
    hog = hit.client.exec_create(hit.id, command, stdout=False, stderr=False)
    hit.client.exec_start(hog["Id"], detach=True)


@dataclass
class Held:
    """A probe: how often the kernel has held a container back at a limit, since the limit was set."""

    fault: str
    nodes: Sequence[LiveNode]
    period_s: float = 0.5
    _before: dict[int, int] = field(default_factory=dict)

    def sample(self, emit: Emit) -> None:
        try:
            with hits(self.nodes) as found:
                for hit in found:
                    self._look(hit, emit)
        except ChaosError:  # it is gone
            return

    def _look(self, hit: Hit, emit: Emit) -> None:
        node, stats = hit.live.node.index, hit.client.stats(hit.id, stream=False, one_shot=True)
        throttled = stats["cpu_stats"].get("throttling_data", {}).get("throttled_periods", 0)
        now = int(throttled) + int(stats["memory_stats"].get("failcnt") or 0)
        before = self._before.setdefault(node, now)
        if now > before:
            data = {"fault": self.fault, "node": node, "action": "limited", "times": now - before}
            emit(Kind.CONTAINER, data)
            emit(Kind.EFFECT, {"fault": self.fault, "effect": f"node {node} was held back at its limit"})
            self._before[node] = now
