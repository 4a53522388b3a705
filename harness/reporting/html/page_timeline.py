"""A run as lanes over time: faults, recoveries, torchelastic, probes, and a lane for each rank. Each recovery also as a
flame graph: blocks such as the start of the ranks, and below them their parts. Pure. All times are seconds since the
run began.

In a long run, steps far from every fault are drawn in groups. In a large run, not every rank has a lane. The page names
everything that was left out."""

from __future__ import annotations

import math
import posixpath
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.analysis.recovery_times import on_until_s
from torchaos.harness.protocol.collective_stamps import Stamp
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Execution, History
from torchaos.harness.record.plan import numbered
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Recovery
from torchaos.harness.reporting.html.charts import groups
from torchaos.harness.reporting.html.log_evidence import words
from torchaos.harness.reporting.terminal.headline import STRETCHES, spans, spent_in_words
from torchaos.harness.reporting.terminal.headline import spans as parts_of

MOST_RANKS = 32  # lanes
_FURTHEST = 8  # ranks


def ranks_with_lanes(history: History, landed: Sequence[Landing], named: Collection[int]) -> tuple[list[int], str]:
    """The ranks that have a lane, and a sentence about the other ranks, empty if there are none. `named`: the ranks
    that the user asked for."""
    every = {rank for attempt in history.attempts for rank in attempt.ranks} | history.executions.ranks
    if len(every) <= MOST_RANKS and not named:
        return sorted(every), ""
    hit = {rank for landing in landed for rank in landing.ranks}
    behind = set(_furthest_behind(history))
    groups = (set(named), hit, behind, every if not named else set())
    order = sorted(set().union(*groups) & every, key=lambda rank: (*(rank not in group for group in groups), rank))
    shown = sorted(order[:MOST_RANKS])
    if len(shown) == len(every):
        return shown, ""
    which = "those given by --ranks, those" if named else "the first ranks, those"
    return shown, (
        f"{len(shown)} of {len(every)} ranks have a lane: {which} that were hit, and those that ended a step furthest "
        "behind the first rank. `torchaos report --ranks 8-15` gives other ranks a lane"
    )


def _furthest_behind(history: History) -> list[int]:
    """The ranks that were latest: those that ended some step the longest time after its first rank."""
    steps = history.by_step()
    if not len(steps):
        return []
    ended, rank = steps.executions.mono_s, steps.executions.rank
    behind = ended + steps.of_each(steps.most(-ended))
    longest = np.zeros(int(rank.max()) + 1)
    np.maximum.at(longest, rank, behind)
    found: list[int] = np.argsort(-longest, kind="stable")[:_FURTHEST].tolist()
    return found


@dataclass(frozen=True)
class Block:
    """A block of the chart of a recovery. `left` and `width`: in percent of the recovery's duration."""

    words: str
    stretch: str  # decides the colour
    took_s: float
    left: float
    width: float


@dataclass(frozen=True)
class Flame:
    stretches: tuple[Block, ...]
    parts: tuple[Block, ...]


def flame_of(parts: Mapping[str, float | None]) -> Flame | None:
    """The chart of a recovery. None if fewer than two of its parts have a duration: there is nothing to compare."""
    seen = [span for span in spans(parts) if span.end_s is not None and span.took_s > 0]
    whole_s = max((span.end_s or 0.0 for span in seen), default=0.0)
    if len(seen) < 2:
        return None
    names = {part: name for name, own in STRETCHES.items() for part in own}
    small = []
    for span in seen:
        place = _place(span.begin_s, span.took_s, whole_s)
        small.append(Block(spent_in_words(span.part), _class(names.get(span.part, "")), span.took_s, *place))
    large: list[Block] = []
    for name, own in STRETCHES.items():
        inside = [span for span in seen if span.part in own]
        if inside:
            begin_s = inside[0].begin_s
            took_s = max(span.end_s or 0.0 for span in inside) - begin_s
            large.append(Block(name, _class(name), took_s, *_place(begin_s, took_s, whole_s)))
    return Flame(tuple(large), tuple(small))


def _class(name: str) -> str:
    return name.split(" ")[0]


def _place(begin_s: float, took_s: float, whole_s: float) -> tuple[float, float]:
    return round(100 * begin_s / whole_s, 3), round(100 * took_s / whole_s, 3)


MOST_FAULTS = 8  # lanes
MOST_STEPS, MOST_MARKS, MOST_CALLS = 12_000, 400, 4_000  # steps in all lanes together
PHASES = ("data", "forward", "backward", "optimizer")  # the phases, in their order within a step
_PROBES = (
    Kind.RANK_STATE, Kind.PROBED, Kind.NETWORK, Kind.EFFECT, Kind.GPU_EVENT, Kind.HANG_SUSPECTED, Kind.HANG_DECLARED,
)  # fmt: skip
_EVENTS = (
    Kind.JOB_STARTED, Kind.JOB_EXITED, Kind.NODE_STARTED, Kind.NODE_EXITED, Kind.ELASTIC_FAILURE, Kind.ELASTIC_TEARDOWN,
    Kind.ELASTIC_RENDEZVOUS, Kind.ELASTIC_RESTART, Kind.LOG_CAUSE, Kind.STOPPED,
)  # fmt: skip


@dataclass
class Timeline:
    """The data for the chart. `spans`: [lane, begin, end, kind, label]; `steps`: [lane, attempt, first step, last step,
    begin, end, seconds in each of PHASES]; `marks`: [lane, time, kind, label]; `shades`: [begin, end, label]."""

    start_s: float  # CLOCK_MONOTONIC
    wall_s: float
    end: float = 0.0
    lanes: list[dict[str, Any]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    shades: list[list[Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def lane(self, name: str, kind: str) -> int:
        self.lanes.append({"name": name, "kind": kind})
        return len(self.lanes) - 1

    def at(self, mono_s: float) -> float:
        return round(mono_s - self.start_s, 4)

    def span(self, lane: int, begin_s: float, end_s: float, kind: str, label: str) -> None:
        self.spans.append([lane, self.at(begin_s), self.at(max(begin_s, end_s)), kind, label])


def timeline_of(
    run: Record, recoveries: Sequence[Recovery], stamps: Sequence[Sequence[Stamp]] = (), ranks: Collection[int] = (),
) -> Timeline:  # fmt: skip
    """The timeline of a run. `ranks`: the ranks that must have a lane."""
    if not run.events:
        return Timeline(0.0, 0.0)
    found = Timeline(run.events[0].mono_s, run.events[0].wall_s)
    found.end = found.at(run.events[-1].mono_s)
    landed = landings(run)
    _faults(found, run, landed, recoveries)
    for landing, recovery in zip(landed, recoveries, strict=False):
        _recovery(found, landing, recovery, f", {recovery.fault}" if len(landed) > 1 else "")
    _markers(found, run, "events", _EVENTS)
    _markers(found, run, "probes", _PROBES)
    shown, others = ranks_with_lanes(run.history, landed, ranks)
    found.left_out += [others] if others else []
    lanes = {rank: found.lane(f"rank {rank}", "rank") for rank in shown}
    _attempts(found, run, lanes)
    _steps(found, run, lanes, [landing.at_s for landing in landed])
    _files(found, run, lanes)
    _calls(found, lanes, stamps)
    return found


def _faults(to: Timeline, run: Record, landed: Sequence[Landing], recoveries: Sequence[Recovery]) -> None:
    """Draws the faults. A fault lasts from its landing until it is undone; a fault that can't be undone is drawn as a
    mark. The shade of each fault ends when the job has caught up."""
    if not run.plan.faults:
        return
    names = {fault.id: fault.inject for fault in run.plan.faults}
    if len(names) <= MOST_FAULTS:
        lanes = {name: to.lane(name, "fault") for name in names}
    else:
        lanes = dict.fromkeys(names, to.lane("faults", "fault"))
    for number, landing in enumerate(landed):
        end = on_until_s(run, landing)
        final = {event.data["record"] for event in run.of_kind(Kind.GUARDED) if event.data.get("why")}
        caught = recoveries[number].parts.get("caught_up") if number < len(recoveries) else None
        over = landing.at_s + caught if caught is not None else to.start_s + to.end
        end = over if end == math.inf else end
        inject = names.get(landing.fault, "")
        label = landing.fault if inject in ("", landing.fault) else f"{landing.fault} ({inject})"
        whom = f" on {numbered('rank', landing.ranks)}" if landing.ranks else ""
        lane, for_good = lanes.get(landing.fault, 0), landing.fault in final
        if for_good:
            to.marks.append([lane, to.at(landing.at_s), "hit", label + whom])
        else:
            to.span(lane, landing.at_s, end, "fault", label + whom)
        to.shades.append([to.at(landing.at_s), to.at(over if for_good else max(end, over)), label])


def _recovery(to: Timeline, landing: Landing, recovery: Recovery, of_what: str) -> None:
    lane = to.lane("recovery", "recovery")
    for part in parts_of(recovery.parts):
        if part.end_s is not None and part.took_s > 0:
            begin, end = landing.at_s + part.begin_s, landing.at_s + part.end_s
            to.span(lane, begin, end, f"part {part.part}", spent_in_words(part.part) + of_what)


def _markers(to: Timeline, run: Record, name: str, kinds: tuple[Kind, ...]) -> None:
    events = list(run.of_kind(*kinds))
    if not events:
        return
    if len(events) > MOST_MARKS:
        to.left_out.append(f"only every {-(-len(events) // MOST_MARKS)}. of {len(events)} {name} is marked")
        events = events[:: -(-len(events) // MOST_MARKS)]
    lane, markers = to.lane(name, "marks"), words(run.plan, events)
    to.marks += [[lane, to.at(event.mono_s), event.kind.value, text] for event, text in markers]


def _attempts(to: Timeline, run: Record, lanes: dict[int, int]) -> None:
    for attempt in run.history.attempts:
        for rank, process in attempt.ranks.items():
            if rank not in lanes:
                continue
            end = process.exited_s or attempt.ended_s or to.start_s + to.end
            to.span(lanes[rank], process.up_s, end, "attempt", f"attempt {attempt.number}, pid {process.pid}")
            if process.exited_s is not None:
                code = process.exit_code
                kind = "exit" if code == 0 else "exit bad"
                to.marks.append([lanes[rank], to.at(process.exited_s), kind, f"pid {process.pid}: exit code {code}"])


def _steps(to: Timeline, run: Record, lanes: dict[int, int], moments: Sequence[float]) -> None:
    by_rank: dict[int, list[Execution]] = defaultdict(list)
    steps = run.history.executions
    for one in steps.at(np.isin(steps.rank, list(lanes))):
        by_rank[one.rank].append(one)
    most, grouped = max(20, MOST_STEPS // max(1, len(by_rank))), 0
    for rank, own in sorted(by_rank.items()):
        own.sort(key=lambda one: one.mono_s)
        begins = _begins(own)
        for first, last in groups([one.mono_s for one in own], most, moments, [one.attempt for one in own]):
            some = own[first : last + 1]
            grouped += len(some) > 1
            phases = [round(sum(one.phases.get(name, 0.0) for one in some), 4) for name in PHASES]
            begin, end = to.at(begins[first]), to.at(some[-1].mono_s)
            numbers = [one.global_step or one.local_step for one in (some[0], some[-1])]
            to.steps.append([lanes[rank], some[0].attempt, *numbers, begin, end, *phases])
    if grouped:
        to.left_out.append(f"steps far from every fault are drawn in groups: {grouped} groups in all lanes")


def _begins(own: Sequence[Execution]) -> list[float]:
    """When each step began: at the end of the step before. For the first step of an attempt: when its first phase
    began."""
    found = []
    for number, one in enumerate(own):
        before = own[number - 1] if number and own[number - 1].attempt == one.attempt else None
        found.append(before.mono_s if before else one.mono_s - sum(one.phases.values()))
    return found


def _files(to: Timeline, run: Record, lanes: dict[int, int]) -> None:
    for save in run.history.saves:
        if (lane := lanes.get(min(save.ranks, default=0))) is not None:
            end = save.ended_s if save.ended_s is not None else save.begun_s + save.blocked_s
            suffix = "" if save.ok else ", not finished"
            to.span(lane, save.begun_s, end, "save" if save.ok else "save bad", f"save {_name(save.path)}{suffix}")
    began = {(e.source, str(e.data["path"])): e.mono_s for e in run.of_kind(Kind.LOAD_BEGIN)}
    for event in run.of_kind(Kind.LOAD_END):
        if event.rank in lanes:
            begin = began.get((event.source, str(event.data["path"])), event.mono_s)
            kind = "load" if event.data["ok"] else "load bad"
            to.span(lanes[event.rank], begin, event.mono_s, kind, f"load {_name(str(event.data['path']))}")


def _calls(to: Timeline, lanes: dict[int, int], stamps: Sequence[Sequence[Stamp]]) -> None:
    """Draws the last collectives of each rank process, if the agent recorded their times."""
    own = [stamp for some in stamps for stamp in some if stamp.rank in lanes]
    if len(own) > MOST_CALLS:
        to.left_out.append(f"the last {MOST_CALLS} of {len(own)} collectives are drawn")
        own = sorted(own, key=lambda stamp: stamp.start_mono_s)[-MOST_CALLS:]
    for stamp in own:
        end = stamp.end_mono_s if stamp.end_mono_s is not None else to.start_s + to.end
        label = f"{stamp.op} no. {stamp.seq} of group {stamp.group}, {stamp.bytes} bytes"
        kind = "call" if stamp.end_mono_s is not None else "call open"
        to.span(
            lanes[stamp.rank], stamp.start_mono_s, end, kind, label + ("" if kind == "call" else ", never finished")
        )


def _name(path: str) -> str:
    return posixpath.basename(path.rstrip("/")) or path
