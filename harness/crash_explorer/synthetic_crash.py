"""The records by which a resume is judged: the recorded run up to a death, continued by the resume; and the resume and
its twins, cut at the last step that all ranks of the resume finished. Pure, but for the times of files.

A state of the folder stands for a death of the whole job that did not really happen. So the events up to the death are
those of the recorded run, and the death is simulated by events: a kill of all ranks. The resume is then the next
attempt of the same run, and every assertion judges it like a run with `process.kill`.

A resume is ended soon after the death, perhaps in the middle of a save. So what it wrote after its last step is not
judged, and neither is what it lacks of the twin's work after that step."""

from __future__ import annotations

import math
import os
import posixpath
import signal
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchaos.harness import registry
from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, checkpoints_of
from torchaos.harness.analysis.checkpointing.resume_points import are_alternatives
from torchaos.harness.crash_explorer.operations import Operation
from torchaos.harness.host.disk import owner_only
from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import final_path
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
    """The plan of a resume: its last fault is the death of all ranks, before the job is started. Of the plan's own
    faults only such deaths remain, because the recorded run may be a resume itself."""
    kill = registry.find("injectors", "process.kill")
    death = PlannedFault(
        DEATH, kill.name, "rank", Target(tuple(range(plan.job.world_size))), After(), {}, "", kill.__name__
    )
    earlier = (replace(fault, id=_earlier(fault.id)) for fault in plan.faults if fault.id.startswith(DEATH))
    return replace(plan, faults=(*earlier, death), steady_state=(), stop=(), until=())


def without_missed_death(run: Record) -> Record:
    """The run; if the job died before a rank was up, without the death in its plan, because no rank was hit."""
    if next(run.of_fault(DEATH, Kind.APPLYING), None) is not None:
        return run
    return replace(run, plan=replace(run.plan, faults=tuple(fault for fault in run.plan.faults if fault.id != DEATH)))


def write(
    events: Path, recorded: Record, died_s: float, by_rank: Mapping[int, float], now_s: float,
    lines: Mapping[int | None, Sequence[Operation]] | None = None, damage: Sequence[Mapping[str, Any]] = (),
) -> int:  # fmt: skip
    """Writes the events before the death into `events`, the empty folder of the resume's events, and returns their
    number. All times are shifted, so that the death is just before `now_s`: the pause between the recorded run and the
    resume is not the job's time.

    - `died_s`: when the job died in the recorded run (CLOCK_MONOTONIC, as the next)
    - `by_rank`: when ranks died earlier than the job
    - `lines`: the operations of each rank
    - `damage`: data for the events of a fault that damaged the files after the death"""
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
    """When all ranks died, in a resume (CLOCK_MONOTONIC). If the job had died before a rank was up: when it was started
    again. 0 in a run that was never started."""
    hit = next((event.mono_s for event in run.of_fault(DEATH, Kind.APPLYING)), None)
    starts = (event.mono_s for event in run.of_kind(Kind.JOB_STARTED) if event.data["submission"] >= 0)
    return min(starts, default=0.0) if hit is None else hit


def unfinished(
    recorded: Record, died_s: float, lines: Mapping[int | None, Sequence[Operation]],
    by_rank: Mapping[int, float] = MappingProxyType({}),
) -> frozenset[tuple[str, int, Kind]]:  # fmt: skip
    """The SAVE_END events to leave out of the record, as (source, number, kind): the file was written before the death,
    but the checkpoint was not complete.

    It was not complete if, in the recorded run, the rank did more for it between the death and its own next step:
    renamed the file, or worked in the folder. Work on another checkpoint does not count if the job could resume from
    that one as well. `died_s`: when all ranks died (CLOCK_MONOTONIC). `by_rank`: when ranks died at other times.
    `lines`: the operations of each rank, in order. An operation that ended exactly at the death was not done."""
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
    """Whether the operation belongs to the save of another checkpoint from which the job could resume as well as from
    `path`."""
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
    """A new id for an earlier death, before another death is added."""
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


_TICK_S = 0.01  # seconds: the longest tick (CONFIG_HZ=100) of the clock that gives files their times
_OF_STEPS = (Kind.STEP, Kind.LOSS)
_OF_SAVES = (Kind.SAVE_BEGIN, Kind.SAVE_END)
_ALWAYS = (Kind.RANK_UP, Kind.RANK_EXITED, Kind.AGENT_ENDED, Kind.AGENT_FAILED, Kind.AGENT_STARTED)


@dataclass(frozen=True)
class Cut:
    """Where a resume is cut."""

    attempt: int
    local_step: int  # of the last attempt
    mono_s: float  # when the slowest rank had finished that step
    wall_s: float


def truncate(events: Iterable[Event], ranks: int) -> Cut | None:
    """Where to cut a run that was ended on purpose. None if a rank of its newest attempt made no step."""
    steps = [event for event in events if event.kind is Kind.STEP and event.attempt is not None]
    newest = max((event.attempt or 0 for event in steps), default=0)
    own = [event for event in steps if event.attempt == newest]
    done: dict[int | None, int] = {}
    for event in own:
        done[event.rank] = max(done.get(event.rank, 0), event.step or 0)
    if not newest or len(done) < ranks:
        return None
    last = min(done.values())
    slowest = max((event for event in own if event.step == last), key=lambda event: event.mono_s)
    return Cut(newest, last, slowest.mono_s, slowest.wall_s)


def truncate_all(run: Record, twins: Sequence[Record], ranks: int) -> tuple[Record, list[Record]]:
    """The run and its twins, cut at the same step. Unchanged if the run was not ended on purpose."""
    cut = truncate(run.events, ranks) if run.ended_on_purpose else None
    if cut is None:
        return run, list(twins)
    before = (event for event in run.events if event.attempt != cut.attempt)
    resumed = [event for event in run.events if event.attempt == cut.attempt]
    own = _until_step(resumed, cut.local_step, cut.mono_s)
    run = _with(run, sorted((*before, *own), key=lambda event: event.mono_s))
    last, inventory = run.history.last_step, run.artifacts.get("inventory")
    if last is None:
        return run, list(twins)
    changed = set[str]()  # checkpoints that were changed after the cut
    if inventory:
        entries = {str(entry["path"]): entry for entry in inventory["checkpoints"]}
        times = {path: _changed_s(Path(inventory["root"], path)) for path in entries}
        changed = {path for path, changed_s in times.items() if changed_s > cut.wall_s - _TICK_S}
        began_s = min(event.wall_s for event in resumed)
        old = {path for path, changed_s in times.items() if changed_s < began_s}
        gone = changed | old & _superseded(checkpoints_of(run) or (), changed)
        kept = [entry for path, entry in entries.items() if path not in gone]
        run = _with(run, run.events, kept, [entries[path] for path in changed])
    ours = {checkpoint.path: checkpoint.step for checkpoint in checkpoints_of(run) or ()}
    unjudged = [save for save in run.history.saves if save.attempt == cut.attempt and not _is_there(save, run, ours)]
    # The save of the last step may not have begun.
    until = min([last - 1, *(save.global_step - 1 for save in unjudged if save.global_step is not None)])
    run = _with(run, list(_without(run.events, unjudged)))
    return run, [_twin_until(twin, last, until, ours, changed) for twin in twins]


def _superseded(found: Sequence[Checkpoint], changed: Collection[str]) -> set[str]:
    """The torn checkpoints that are excused: a newer checkpoint may have replaced them at the time of the cut and be
    gone since, because a job may keep only its newest checkpoint. These are older than a whole checkpoint that was
    changed after the cut, and were left by the dead attempt, not written by the resumed job."""
    newer = [checkpoint.step or 0 for checkpoint in found if checkpoint.good and checkpoint.path in changed]
    return {one.path for one in found if newer and not one.complete and (one.step or 0) <= max(newer)}


def _twin_until(
    twin: Record, last: int, saved: int, ours: Mapping[str, int | None], changed: Collection[str]
) -> Record:  # fmt: skip
    """The twin as if it had ended with the global step `last`. Of its checkpoints after the step `saved`, only those in
    `ours` (the steps of our checkpoints, by path) remain. `changed`: paths that are left out."""
    last_s = max(
        (execution.mono_s for execution in twin.history.executions if (execution.global_step or 0) <= last), default=0.0
    )
    events = list(_until_step(twin.events, last, last_s))
    late = [save for save in twin.history.saves if (save.global_step or 0) > saved]
    inventory = twin.artifacts.get("inventory")
    if not inventory:
        return _with(twin, list(_without(events, late)))
    kept = {
        checkpoint.path for checkpoint in checkpoints_of(twin) or ()
        if checkpoint.path not in changed
        and ((checkpoint.step or 0) <= saved or ours.get(checkpoint.path) == checkpoint.step)
    }  # fmt: skip
    late = [save for save in late if not any(_same(save.path, inventory, path) for path in kept & ours.keys())]
    return _with(
        twin, list(_without(events, late)), [entry for entry in inventory["checkpoints"] if entry["path"] in kept]
    )


def _with(
    record: Record, events: Sequence[Event], checkpoints: Sequence[Any] | None = None, later: Sequence[Any] = ()
) -> Record:  # fmt: skip
    """A copy of the record with other events and checkpoints, and without values that were computed from the old ones.
    `later`: checkpoints that are not judged."""
    artifacts = dict(record.artifacts)
    if checkpoints is not None:
        artifacts["inventory"] = {**artifacts["inventory"], "checkpoints": list(checkpoints), "later": list(later)}
    return replace(record, events=tuple(events), artifacts=artifacts)


def _until_step(events: Iterable[Event], step: int, mono_s: float) -> Iterator[Event]:
    """The events of ranks up to a step and its time, the ends of saves that had begun by then, and all events of other
    sources."""
    begun: set[tuple[int | None, str]] = set()
    for event in events:
        if event.rank is None or event.kind in _ALWAYS:
            yield event
        elif event.kind in _OF_STEPS:
            if (event.step or 0) <= step:
                yield event
        elif event.kind is Kind.SAVE_BEGIN:
            if event.mono_s <= mono_s:
                begun.add((event.rank, str(event.data["path"])))
                yield event
        elif event.kind is Kind.SAVE_END:
            who = (event.rank, str(event.data["path"]))
            if event.mono_s <= mono_s or who in begun:
                begun.discard(who)
                yield event
        elif event.mono_s <= mono_s:
            yield event


def _without(events: Iterable[Event], saves: Iterable[Save]) -> Iterator[Event]:
    """The events without those of `saves`, and without those of saves that began in the same step."""
    begun = {(save.attempt, save.local_step) for save in saves}
    left_out: set[tuple[int | None, str]] = set()
    for event in events:
        who = (event.rank, str(event.data["path"])) if event.kind in _OF_SAVES else None
        if event.kind is Kind.SAVE_BEGIN and who and (event.attempt, event.step) in begun:
            left_out.add(who)
        elif event.kind is Kind.SAVE_END and who in left_out:
            left_out.discard(who)
        else:
            yield event


def _is_there(save: Save, run: Record, kept: Iterable[str]) -> bool:
    inventory = run.artifacts.get("inventory")
    return bool(save.ok) if not inventory else any(_same(save.path, inventory, path) for path in kept)


def _same(saved: str, inventory: Mapping[str, Any], path: str) -> bool:
    """Whether the saved path is the path of a checkpoint in an inventory, or of a file in that checkpoint."""
    own, other = final_path(posixpath.normpath(saved)), final_path(posixpath.join(str(inventory["root"]), path))
    return own == other or own.startswith(f"{other}/") or other.startswith(f"{own}/")


def _changed_s(path: Path) -> float:
    """When the file, or a file in the folder, was last changed, in seconds since the epoch; minus infinity if the
    path does not exist."""
    newest = _mtime(str(path))
    for folder, _below, names in os.walk(path):
        newest = max([newest, *(_mtime(os.path.join(folder, name)) for name in (".", *names))])
    return newest


def _mtime(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return -math.inf
