"""What each landing really hit, according to the processes that ran at that time: attempt, ranks, nodes and GPUs. A
*landing* is one hit of a fault in one attempt.

torchelastic numbers the ranks again in each attempt. GPUs are numbered on each node, so a GPU is (node, NVML index)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import History, saved_as
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.record import Record


class RunSoFar(Protocol):
    """The events of a run in order of time, and their history: a finished record, or a live run up to now."""

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def history(self) -> History: ...

    def of_kind(self, *kinds: Kind) -> Iterator[Event]: ...


@dataclass(frozen=True)
class Landing:
    """One hit of a fault in one attempt, with all its targets."""

    fault: str
    at_s: float  # the first hit, CLOCK_MONOTONIC
    attempt: int
    ranks: frozenset[int]  # empty: it hit a node or the job itself
    pids: frozenset[int]


def landings(run: RunSoFar) -> list[Landing]:
    """The landings in order of time. A fault that hit in several attempts has a landing in each of them."""
    hits: dict[tuple[str, int], list[Event]] = {}
    seen = list(run.of_kind(Kind.APPLYING, Kind.APPLIED))
    applying = {event.data["fault"] for event in seen if event.kind is Kind.APPLYING}
    for event in seen:
        if event.kind is Kind.APPLIED and event.data["fault"] in applying:
            continue
        alive = run.history.attempt_at(event.mono_s)
        attempt = event.attempt if event.attempt is not None else alive.number if alive else 0
        hits.setdefault((event.data["fault"], attempt), []).append(event)
    found = [_landing(fault, attempt, events) for (fault, attempt), events in hits.items()]
    return sorted(found, key=lambda landing: landing.at_s)


def step_in_words(run: RunSoFar, hit: Event) -> str:
    """The step in which a fault hit, as the agent counted, such as "step 24". If the job had put back an older state in
    the same process before, the step of the history is added where it differs. Empty if the step is not known."""
    counted = hit.data["global_step"]
    if counted is None:
        return ""
    done = run.history.steps_done(hit.rank, hit.attempt, hit.mono_s) if hit.rank is not None else None
    if done is None or done + 1 == counted or not has_put_back(run.history, hit):
        return f"step {counted}"
    return f"step {counted} as the rank counts (step {done + 1} of the job, which had put back an older state)"


def has_put_back(history: History, hit: Event) -> bool:
    """Whether the job had put back an older state of its own in the attempt before this hit, after a first step. Then
    the agent goes on with the step of a state that was loaded, and does not see a state that was kept in memory."""
    attempt, at_s = history.attempt(hit.attempt) if hit.attempt is not None else None, hit.mono_s
    if attempt is None:
        return False
    loads = (load for load in history.loads if load.attempt == hit.attempt and load.ok and load.mono_s <= at_s)
    own = any(load.local_step and saved_as(load.path, history.saves, load.mono_s) for load in loads)
    began = range(attempt.base or 0, (history.steps_done(hit.rank, hit.attempt, at_s) or 0) + 1)
    back = any(part.number == hit.attempt and part.after and part.started_s <= at_s for part in history.segments)
    return own or back or any(step in began for step in history.program_returns)


def _landing(fault: str, attempt: int, events: Sequence[Event]) -> Landing:
    ranks = frozenset(event.rank for event in events if event.rank is not None)
    pids = frozenset(event.data["pid"] for event in events if event.data.get("pid"))
    return Landing(fault, min(event.mono_s for event in events), attempt, ranks, pids)


Gpu = tuple[int, int]


def hit_target(run: Record, fault: PlannedFault, hits: Sequence[Event]) -> Target:
    """The fault's target, with the ranks that its nodes had when it landed. The planned target if these ranks are not
    known."""
    if not fault.target.nodes or not hits:
        return fault.target
    there = _there(run, hits[0])
    ranks = {up.rank for up in there if up.data["node"] in fault.target.nodes and up.rank is not None}
    return Target(tuple(sorted(ranks)), fault.target.nodes) if there else fault.target


def strayed(run: Record, fault: PlannedFault, hits: Sequence[Event]) -> str | None:
    """How a fault missed its target, as a clause: a target node had no rank, or another node felt the fault. None if no
    such thing was seen."""
    for hit in hits:
        there = {up.data["node"] for up in _there(run, hit)}
        idle = set(fault.target.nodes) - there if there else set()
        on_standby = hit.rank is None and fault.params.get("gpu") is not None  # a GPU that no rank uses
        if idle and not on_standby:
            where = ", ".join(map(str, sorted(there)))
            return (
                f"node {min(idle)} had no rank when the fault came; the ranks were on "
                f"node{'s' * (len(there) > 1)} {where}"
            )
    pids = {hit.data["pid"] for hit in hits}
    meant = set(fault.target.nodes) or {up.data["node"] for up in run.of_kind(Kind.RANK_UP) if up.data["pid"] in pids}
    felt_on = {effect.data["node"] for effect in run.of_fault(fault.id, Kind.EFFECT) if "node" in effect.data}
    others = felt_on - meant if meant else set()
    if others:
        return f"it was felt on node {min(others)}, which is not its target"
    return _on_another_gpu(run, fault, pids)


def _on_another_gpu(run: Record, fault: PlannedFault, pids: Set[int]) -> str | None:
    """A clause: the driver lists a rank that was hit on other GPUs than those that were shown as broken. None if the
    fault missed no rank. For faults that hit the ranks' own GPUs."""
    given = {effect.data["gpu"] for effect in run.of_fault(fault.id, Kind.EFFECT) if "gpu" in effect.data}
    if not given or fault.params.get("gpu") is not None:
        return None
    samples = [sample.data for sample in run.of_kind(Kind.GPU)]
    for up in run.of_kind(Kind.RANK_UP):
        node, pid = up.data["node"], up.data["pid"]
        used = {one["gpu"] for one in samples if pid in pids and pid in one["pids"] and one["node"] == node}
        if used and not used & given:
            return (
                f"it was shown for GPU {min(given)}, as the environment of rank {up.rank} says, and the driver lists "
                f"that rank on GPU {min(used)}; write gpu"
            )
    return None


def _there(run: Record, hit: Event) -> list[Event]:
    """The start events of the ranks of one attempt: the newest that had a rank when the fault hit."""
    ups = list(run.of_kind(Kind.RANK_UP))
    latest = max((up.attempt or 0 for up in ups if up.mono_s <= hit.mono_s), default=None)
    return [up for up in ups if up.attempt == latest]


def gpus_of(run: Record, hit: Landing) -> frozenset[Gpu]:
    """The GPUs that the landing hit. On the nodes of the ranks that were hit: the GPU that the scenario names or, if it
    names none, each rank's own GPU. On a node without ranks: the named GPU."""
    fault = next((fault for fault in run.plan.faults if fault.id == hit.fault), None)
    named = fault.params.get("gpu") if fault else None
    ups = [event for event in run.of_kind(Kind.RANK_UP) if event.data["pid"] in hit.pids]
    found = [(up.data["node"], _gpu_of(up) if named is None else int(named)) for up in ups]
    if fault and named is not None:
        found += [(node, int(named)) for node in fault.target.nodes]
    return frozenset((node, gpu) for node, gpu in found if gpu is not None)


def ranks_on(run: Record, gpus: frozenset[Gpu]) -> Iterator[Event]:
    """The start events of ranks on any of these GPUs, in order of time."""
    return (up for up in run.of_kind(Kind.RANK_UP) if (up.data["node"], _gpu_of(up)) in gpus)


def unplaced_on(run: Record, nodes: Container[int | None]) -> Iterator[Event]:
    """The start events of ranks on these nodes whose GPU is not known."""
    return (up for up in run.of_kind(Kind.RANK_UP) if up.data["node"] in nodes and _gpu_of(up) is None)


def _gpu_of(up: Event) -> int | None:
    """NVML's index of the rank's GPU, as far as the rank's environment shows it. None if it is not known; journals of
    early versions lack it."""
    gpu: int | None = up.data.get("gpu", up.data["local_rank"])
    return gpu
