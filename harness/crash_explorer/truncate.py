"""Cuts a resume and its twins at the same step: the last step that all ranks of the resume finished. Pure, but for the
times of files. A resume is ended soon after the death, in the middle of anything, such as a save. So its writes after
the cut are not judged, and the twin's work after the cut is not missed."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, checkpoints_of
from torchaos.harness.record.history import Save
from torchaos.harness.record.history.saves_and_loads import final_path
from torchaos.harness.record.record import Record

_TICK_S = 0.01  # the longest tick (CONFIG_HZ=100) of the clock from which Linux takes the times of files
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


def cut_of(events: Iterable[Event], ranks: int) -> Cut | None:
    """The cut of a run that was ended on purpose. None if some rank of its newest attempt made no step."""
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


def cut_together(run: Record, twins: Sequence[Record], ranks: int) -> tuple[Record, list[Record]]:
    """The run and its twins, cut at the same step. Unchanged if the run was not ended on purpose."""
    cut = cut_of(run.events, ranks) if run.ended_on_purpose else None
    if cut is None:
        return run, list(twins)
    before = (event for event in run.events if event.attempt != cut.attempt)
    resumed = [event for event in run.events if event.attempt == cut.attempt]
    own = _until(resumed, cut.local_step, cut.mono_s)
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
    """The torn checkpoints that are older than a whole checkpoint that was changed after the cut. What superseded them
    at the cut may be gone since: a job may keep only its newest checkpoint. This excuses what the dead attempt left,
    and not what the resumed job wrote."""
    newer = [checkpoint.step or 0 for checkpoint in found if checkpoint.good and checkpoint.path in changed]
    return {one.path for one in found if newer and not one.complete and (one.step or 0) <= max(newer)}


def _twin_until(
    twin: Record, last: int, saved: int, ours: Mapping[str, int | None], changed: Collection[str]
) -> Record:  # fmt: skip
    """The twin as if it had ended with the global step `last`. Of its checkpoints after the step `saved`, only those in
    `ours` (steps of checkpoints by path) remain. `changed`: paths that are left out."""
    last_s = max(
        (execution.mono_s for execution in twin.history.executions if (execution.global_step or 0) <= last), default=0.0
    )
    events = list(_until(twin.events, last, last_s))
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
    """A copy of the record with other events and checkpoints, without the cached values of the old record. `later`:
    checkpoints that are not judged."""
    artifacts = dict(record.artifacts)
    if checkpoints is not None:
        artifacts["inventory"] = {**artifacts["inventory"], "checkpoints": list(checkpoints), "later": list(later)}
    return replace(record, events=tuple(events), artifacts=artifacts)


def _until(events: Iterable[Event], step: int, mono_s: float) -> Iterator[Event]:
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
    """The events without those of `saves`, and without those of other saves that began in the same step."""
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
