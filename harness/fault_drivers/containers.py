"""The base classes of the `container.*` injectors. The Docker engine of this machine changes the node's container. The
engine's events about that container are the evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchaos.harness.base_classes import Fault
from torchaos.harness.fault_drivers.site import TargetGone
from torchaos.harness.host.cluster_tools import EngineError, container_of, engine, events
from torchaos.harness.interfaces import (
    ChaosError,
    Emit,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    LiveNode,
    NodeSite,
    Where,
)
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.container_handles import Container, limits_of

_REPORT_S = 5.0  # seconds; the engine reports within milliseconds, on a busy machine within a second
# The kernel ends the largest process first. Until its memory is free again, it may end another, which is then this
# command and not torchrun. `tail` keeps all bytes: they have no line end.
_HOG = """most=0
for process in /proc/[0-9]*; do
    read -r _ pages _ <$process/statm && [ "$pages" -gt $most ] && most=$pages largest=$process
done 2>/dev/null
echo 900 >/proc/$$/oom_score_adj; echo 1000 >$largest/oom_score_adj
head -c {bytes} /dev/zero | tail >/dev/null"""


@dataclass(frozen=True)
class Hit:
    """A container that a fault hits, and a connection to its engine."""

    client: Any
    live: LiveNode
    now: Any  # the engine's description before the fault

    @property
    def id(self) -> str:
        return str(self.now["Id"])

    @property
    def network(self) -> tuple[str, str]:
        """The id and the name of the run's network. Raises ChaosError if the container is on no network."""
        for name, network in self.now["NetworkSettings"]["Networks"].items():
            return str(network["NetworkID"]), str(name)
        raise ChaosError(f"the container of node {self.live.node.index} is on no network")


@contextmanager
def hits(nodes: Iterable[LiveNode]) -> Iterator[list[Hit]]:
    """The containers of these nodes. Raises ChaosError if one of them does not run, or if the engine does not
    answer."""
    nodes = list(nodes)
    try:
        with engine(_engine_of(nodes[0])) as client:
            containers = [Hit(client, live, container_of(client, live.run_id, live.node.index)) for live in nodes]
            for hit in containers:
                if not hit.now["State"]["Running"]:
                    raise ChaosError(f"the container of node {hit.live.node.index} does not run")
            yield containers
    except EngineError as error:
        raise ChaosError(str(error)) from error


def _engine_of(live: LiveNode) -> str:
    """The address of the engine. Raises ChaosError if the node is not a container."""
    node: Any = live.node
    where = getattr(node, "engine", None) or getattr(getattr(node, "inner", None), "engine", None)
    if where is None:
        raise ChaosError(f"node {live.node.index} is no container; write launcher: docker")
    return str(where)


def changes(site: NodeSite, part: Literal["running", "network", "limits"]) -> Sequence[Container]:
    """The handles for what `do` will change in `part` of the containers."""
    with hits(site.nodes) as containers:
        return [Container(_engine_of(hit.live), hit.live.run_id, hit.id, part, _good(hit, part)) for hit in containers]


def _good(hit: Hit, part: str) -> Mapping[str, Any]:
    if part == "network":
        network, name = hit.network
        return {"network": network, "address": hit.now["NetworkSettings"]["Networks"][name]["IPAddress"]}
    return limits_of(hit.now) if part == "limits" else {}


def do(site: NodeSite, act: Callable[[Hit], object], action: str, last: str = "") -> None:
    """Calls `act` for all containers at once, and records the engine's events about them. When the engine has reported
    `action`, held ranks continue. Returns when the engine has also reported `last`. Raises ChaosError if the engine
    refuses."""
    since = time.time()
    with hits(site.nodes) as containers, ThreadPoolExecutor(max(1, len(containers))) as pool:
        _check(site, containers)
        done = [pool.submit(act, hit) for hit in containers]
        reported = [_report(site, hit, request, since, action) for hit, request in zip(containers, done, strict=True)]
        site.release()
        for hit, request, number in zip(containers, done, reported, strict=True):
            request.result()
            _report(site, hit, request, since, last or action, number)


def _check(site: NodeSite, containers: Iterable[Hit]) -> None:
    """Raises TargetGone if a node now has another container than the one whose undo is on disk."""
    known = {handle.id for handle in site.undo_on_disk if isinstance(handle, Container)}
    for hit in containers:
        if known and hit.id not in known:
            raise TargetGone(f"node {hit.live.node.index} has another container than the one whose undo is on disk")


def _report(site: NodeSite, hit: Hit, done: Future[object], since: float, action: str, reported: int = 0) -> int:
    """Emits the engine's events about the container since `since`, except for the first `reported` of them. Returns
    when `action` is among them, when the request has failed, or after _REPORT_S seconds. Returns how many events have
    been emitted in all."""
    end = time.monotonic() + _REPORT_S
    while time.monotonic() < end and not (done.done() and done.exception()):
        with engine(_engine_of(hit.live)) as client:  # `act` uses the other connection now
            seen = events(client, hit.id, since)
        for event in seen[reported:]:
            code = event["Actor"]["Attributes"].get("exitCode")
            more = {} if code is None else {"exit_code": int(code)}
            data = {"fault": site.fault, "node": hit.live.node.index, "action": event["Action"], **more}
            site.emit(Kind.CONTAINER, data)
        is_news = action in [event["Action"] for event in seen[reported:]]
        reported = len(seen)
        if is_news:
            effect = f"the engine says of node {hit.live.node.index}: {action}"
            site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect})
        if action in [event["Action"] for event in seen]:
            break
        time.sleep(0.02)
    return reported


def reported(record: Record, fault: str, action: str, words: str) -> Evidence | None:
    """Evidence that the Docker engine reported `action` (Docker's word, such as `pause`) for each node that was hit.
    None if a report is missing. `words`: the text of the evidence, where {nodes} becomes the numbers of the nodes."""
    reports = [event for event in record.of_fault(fault, Kind.CONTAINER) if event.data["action"] == action]
    nodes = {event.data["node"] for event in reports}
    wanted = {event.data.get("node") for event in record.of_fault(fault, Kind.APPLYING)}
    if not wanted or not wanted <= nodes:
        return None
    names = ", ".join(map(str, sorted(nodes)))
    return Evidence.of(words.format(nodes=names), *reports)


def limit(hit: Hit, cpus: float, memory: int) -> None:
    """Limits the CPUs, and the memory in bytes. 0 leaves a limit unchanged."""
    period = hit.now["HostConfig"]["CpuPeriod"] or 100_000
    cpu = {"cpu_period": period, "cpu_quota": round(cpus * period)} if cpus else {}
    most = {"mem_limit": memory, "memswap_limit": memory} if memory else {}
    hit.client.update_container(hit.id, **cpu, **most)


def fill(hit: Hit, spare: int) -> None:
    """Limits the memory to `spare` bytes more than the node uses now, and starts a process that uses up these bytes."""
    stats = hit.client.stats(hit.id, stream=False, one_shot=True)["memory_stats"]
    used = int(stats["usage"]) - int(stats["stats"].get("total_inactive_file", stats["stats"].get("inactive_file", 0)))
    limit(hit, 0.0, used + spare)
    # The command uses no more than that, so it does no harm if the limit is removed while it still runs.
    command = ["sh", "-c", _HOG.format(bytes=used + spare)]
    hog = hit.client.exec_create(hit.id, command, stdout=False, stderr=False)
    hit.client.exec_start(hog["Id"], detach=True)


@dataclass
class Held:
    """A probe that reports how often the kernel has held back a container at its limit, counted from the first
    sample."""

    fault: str
    nodes: Sequence[LiveNode]
    period_s: float = 0.5
    _before: dict[int, int] = field(default_factory=dict)

    def sample(self, emit: Emit) -> None:
        try:
            with hits(self.nodes) as found:
                for hit in found:
                    self._sample(hit, emit)
        except ChaosError:  # the container is gone
            return

    def _sample(self, hit: Hit, emit: Emit) -> None:
        node, stats = hit.live.node.index, hit.client.stats(hit.id, stream=False, one_shot=True)
        throttled = stats["cpu_stats"].get("throttling_data", {}).get("throttled_periods", 0)
        now = int(throttled) + int(stats["memory_stats"].get("failcnt") or 0)
        before = self._before.setdefault(node, now)
        if now > before:
            data = {"fault": self.fault, "node": node, "action": "limited", "times": now - before}
            emit(Kind.CONTAINER, data)
            emit(Kind.EFFECT, {"fault": self.fault, "effect": f"node {node} was held back at its limit"})
            self._before[node] = now


class _OnContainers(Fault):
    """A fault of containers. `words`: the text of the evidence, with {nodes} for the nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"docker"})
    hits: ClassVar[Hits] = "nodes"
    reports: ClassVar[tuple[str, ...]]  # the events of the engine, in order; held ranks continue after the first
    proof: ClassVar[str] = ""  # the event that proves that the fault was felt; empty: the last of `reports`
    words: ClassVar[str]

    def act(self, hit: Hit) -> object:
        raise NotImplementedError

    def apply(self, site: NodeSite) -> None:
        do(site, self.act, self.reports[0], self.reports[-1])

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return reported(record, fault, self.proof or self.reports[-1], self.words)


class ContainerFault(_OnContainers):
    """A fault of a container that can be undone."""

    part: ClassVar[
        Literal["running", "network", "limits"]
    ]  # the part of the container that is changed, and put back by the undo

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return changes(site, self.part)


class ContainerDeath(_OnContainers):
    """A fault that ends the container."""

    lethal: ClassVar[bool] = True
    done: ClassVar[str]  # "killed" or "stopped"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible(f"a container that was {self.done} stays {self.done}; the scheduler may start another")
