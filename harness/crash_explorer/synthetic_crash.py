"""The recorded run up to a death: the part of the journal that a resume continues. A state of the folder stands for a
death of the whole job that did not really happen. So the events up to the death are those of the recorded run, and the
death is simulated by events: a kill of all ranks. The resume is then the next attempt of the same run, and every
assertion judges it like a run with `process.kill`."""

from __future__ import annotations

import math
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchaos.harness import registry
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.analysis.checkpointing.resume_points import are_alternatives
from torchaos.harness.crash_explorer.operations import Operation
from torchaos.harness.host.disk import owner_only
from torchaos.harness.interfaces import Target
from torchaos.harness.record.history import Save
from torchaos.harness.record.plan import After, Plan, PlannedFault
from torchaos.harness.record.record import Record

DEATH = "death"  # the id of the simulated fault
RECORDED = "recorded"  # the source of the recorded run's own events; those of the resume have "harness"
FILE = "past.jsonl"
_BEFORE_S = 0.01  # seconds from the death to the resume
# The harness's own events in the recorded run, and the end of that run, are left out.
_NOT_PAST = frozenset({
    Kind.STAGE, Kind.NOTE, Kind.STOPPED, Kind.PROBED, Kind.GUARDED, Kind.HEALED, Kind.ROLLED_BACK, Kind.JOB_EXITED,
    Kind.NODE_EXITED, Kind.HANG_OPINION, Kind.HANG_SUSPECTED, Kind.HANG_DECLARED, Kind.HANG_AT_END,
})  # fmt: skip


def with_death(plan: Plan) -> Plan:
    """The plan of a resume: its last fault is the death of all ranks, before the job is started. Of the plan's faults,
    only such deaths are kept: the recorded run may be a resume itself."""
    kill = registry.find("injectors", "process.kill")
    death = PlannedFault(
        DEATH, kill.name, "rank", Target(tuple(range(plan.job.world_size))), After(), {}, "", kill.__name__
    )
    earlier = (replace(fault, id=_earlier(fault.id)) for fault in plan.faults if fault.id.startswith(DEATH))
    return replace(plan, faults=(*earlier, death), steady_state=(), stop=(), until=())


def less_missed_death(run: Record) -> Record:
    """The run without the death in its plan if the job died before a rank was up: no rank was hit."""
    if next(run.of_fault(DEATH, Kind.APPLYING), None) is not None:
        return run
    return replace(run, plan=replace(run.plan, faults=tuple(fault for fault in run.plan.faults if fault.id != DEATH)))


def write(
    events: Path, recorded: Record, died_s: float, by_rank: Mapping[int, float], now_s: float,
    lines: Mapping[int | None, Sequence[Operation]] | None = None, damage: Sequence[Mapping[str, Any]] = (),
) -> int:  # fmt: skip
    """Writes the events before the resume into its folder of events, which must be empty, and returns their number.
    `died_s`: when the job died in the recorded run; `by_rank`: ranks that died earlier (both CLOCK_MONOTONIC); `lines`:
    the operations of each rank; `damage`: data of the events of a fault that hit the files after the death. All times
    are shifted so that the death comes just before `now_s`, because the time between the recorded run and the resume
    is not the job's."""
    begun = unfinished(recorded, died_s, lines or {}, by_rank)
    moved_s = now_s - _BEFORE_S - died_s
    count = Counter[str]()
    with open(events / FILE, "wb", opener=owner_only) as file:
        end = _at(recorded, died_s)
        hits = (replace(end, kind=Kind.EFFECT, data=data) for data in damage)
        for event in (*_until(recorded, died_s, by_rank), *_deaths(recorded, died_s), *hits):
            if (event.source, event.seq, event.kind) in begun:
                continue
            number, count[event.source] = count[event.source], count[event.source] + 1
            at_s, wall_s = event.mono_s + moved_s, event.wall_s + moved_s
            file.write(replace(event, seq=number, mono_s=at_s, wall_s=wall_s).to_line())
    return sum(count.values())


def highest_step(recorded: Record, died_s: float) -> int:
    """The highest global step that any rank had finished when the job died."""
    return recorded.history.highest_step(before_s=died_s) or 0


def death_s(run: Record) -> float:
    """When all ranks died, in a resume. If the job had died before a rank was up: when it was started again. 0 in a run
    that was never started."""
    hit = next((event.mono_s for event in run.of_fault(DEATH, Kind.APPLYING)), None)
    starts = (event.mono_s for event in run.of_kind(Kind.JOB_STARTED) if event.data["submission"] >= 0)
    return min(starts, default=0.0) if hit is None else hit


def unfinished(
    recorded: Record, died_s: float, lines: Mapping[int | None, Sequence[Operation]],
    by_rank: Mapping[int, float] = MappingProxyType({}),
) -> frozenset[tuple[str, int, Kind]]:  # fmt: skip
    """The ends of saves with which the job was not finished when it died, although the file had been written: the rank
    then renamed the file, or did something else to the folder before its next step. Such a checkpoint was not complete
    for the job, which only the recorded run shows. An operation that ends when the job dies was not done. A save of
    another checkpoint from which the job could resume just as well is nothing that was missing."""
    newest = recorded.history.attempts[-1].number if recorded.history.attempts else None
    ends = [event for event in recorded.of_kind(Kind.SAVE_END) if event.attempt == newest]
    renames = list(recorded.of_kind(Kind.RENAMED))
    steps: dict[int, list[float]] = defaultdict(list)
    for step in recorded.history.executions:
        steps[step.rank].append(step.mono_s)
    found = set()
    for end in ends:
        path, rank = str(end.data["path"]), end.rank or 0
        rank_died_s = by_rank.get(rank, died_s)
        if end.mono_s >= rank_died_s:
            continue
        move = next((rename for rename in renames if rename.mono_s >= end.mono_s and _is_of(path, rename)), None)
        next_step_s = min((at_s for at_s in steps[rank] if at_s > end.mono_s), default=math.inf)
        others = [save for save in recorded.history.saves if save.begun_s >= end.mono_s and rank in save.ranks]
        more_s = (
            operation.begun_s for operation in lines.get(rank, ())
            if rank_died_s <= operation.ended_s and not _is_of_another(recorded, path, others, operation)
        )  # fmt: skip
        to_move = move is not None and move.mono_s >= by_rank.get(move.rank or 0, died_s)
        if to_move or (next_step_s >= rank_died_s and next(more_s, math.inf) < next_step_s):
            found.add((end.source, end.seq, end.kind))
    return frozenset(found)


def _is_of_another(recorded: Record, path: str, others: Sequence[Save], operation: Operation) -> bool:
    """Whether the operation is part of a save to which the checkpoint at `path` is an alternative."""
    return any(
        save.begun_s <= operation.begun_s <= (save.ended_s or math.inf) and are_alternatives(recorded, path, save.path)
        for save in others
    )


def _is_of(path: str, renamed: Event) -> bool:
    old = str(renamed.data["path"])
    return path == old or path.startswith(f"{old}/")


def _until(recorded: Record, died_s: float, by_rank: Mapping[int, float]) -> Iterator[Event]:
    for event in recorded.events:
        end_s = died_s if event.rank is None else by_rank.get(event.rank, died_s)
        if event.mono_s >= end_s or (event.kind in _NOT_PAST and event.source != RECORDED):
            continue
        if str(event.data.get("fault", "")).startswith(DEATH):
            event = replace(event, data={**event.data, "fault": _earlier(event.data["fault"])})
        if event.kind is Kind.JOB_STARTED:  # the resume's own submissions begin with 0
            event = replace(event, data={**event.data, "submission": -1})
        yield replace(event, source=RECORDED) if event.source == "harness" else event


def _at(recorded: Record, died_s: float) -> Event:
    """An event at the time of the death, to be completed."""
    return Event(Kind.NOTE, RECORDED, 0, recorded.events[0].wall_s - recorded.events[0].mono_s + died_s, died_s)


def _earlier(fault: str) -> str:
    """The id of a death in the past of another death."""
    return f"{fault}-before"


def _deaths(recorded: Record, died_s: float) -> Iterator[Event]:
    """The events of the death: all live ranks are killed at once, and then the job's command."""
    made_up = _at(recorded, died_s)
    for attempt in recorded.history.attempts:
        for rank, process in attempt.ranks.items():
            if process.up_s < died_s and (process.exited_s is None or process.exited_s >= died_s):
                own = replace(made_up, rank=rank, attempt=attempt.number)
                hit = {"fault": DEATH, "phase": None, "global_step": None, "pid": process.pid}
                end = {"pid": process.pid, "start_ticks": process.start_ticks, "exit_code": -signal.SIGKILL}
                yield replace(own, kind=Kind.APPLYING, data=hit)
                yield replace(own, kind=Kind.RANK_EXITED, data=end)
    started = next((event for event in recorded.beside_steps if event.kind is Kind.JOB_STARTED), None)
    if started is not None:
        data = {"submission": -1, "pid": started.data["pid"], "exit_code": -signal.SIGKILL}
        yield replace(made_up, kind=Kind.JOB_EXITED, data=data)
