"""What happened in a run: one line for each notable event, in order of time, with the steps between them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from torchaos.harness.analysis.checkpointing.resume_points import family, points_of
from torchaos.harness.analysis.ending import failed_loads, in_words
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import checkpoint_of, name_of_all, number_in_name
from torchaos.harness.record.history import Attempt, Execution, Executions, Save, saved_as
from torchaos.harness.record.history.saves_and_loads import by_step
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.reporting.terminal.narrator import Narrator
from torchaos.harness.reporting.terminal.text import on_one_line

# Events without a line: the history reports them in global steps, or they do not matter after the run.
_ELSEWHERE = frozenset({
    Kind.STAGE, Kind.STEP, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.KEPT, Kind.BEGUN, Kind.ARMED, Kind.HELD,
})  # fmt: skip
# The turning points of a run: what went wrong, and how it ended.
_TURNS = frozenset({
    Kind.STOPPED, Kind.JOB_EXITED, Kind.LOG_CAUSE, Kind.APPLYING, Kind.APPLIED, Kind.MISSED, Kind.ROLLED_BACK,
    Kind.HEALED, Kind.GPU_EVENT, Kind.AGENT_FAILED, Kind.HANG_DECLARED, Kind.HANG_AT_END,
})  # fmt: skip


_MOST = 400  # lines; more are cut in the middle


class Moment(NamedTuple):
    at_s: float  # since the run began
    text: str


class Turn(Moment):
    """A turning point: an event that the short story has too."""


def happened(run: Record) -> list[Moment]:
    """One line for each notable event of a run, in order of time."""
    if not run.events:
        return []
    began = run.events[0].mono_s
    moments = sorted([*_events(run), *_of_history(run)], key=lambda one: one.at_s)
    # each replica has its own steps at the same time
    with_steps = moments if run.plan.job.replicas > 1 else _with_steps(run, moments)
    lines = [one._replace(at_s=one.at_s - began) for one in with_steps]
    if len(lines) > _MOST:
        head, middle, tail = lines[: _MOST // 2], lines[_MOST // 2 : -(_MOST // 2)], lines[-(_MOST // 2) :]
        turns = [one for one in middle if isinstance(one, Turn)]
        left_out = counted(len(middle) - len(turns), "line", "is/are")
        lines = [*head, Moment(middle[0].at_s, f"({left_out} left out here)"), *turns, *tail]
    return lines


def _events(run: Record) -> Iterator[Moment]:
    narrator = Narrator(run.plan)
    for_good = {event.data["record"] for event in run.of_kind(Kind.GUARDED) if event.data.get("why")}
    # One line for all gradients with an odd norm: there may be one for each backward.
    norms = [event for event in run.of_kind(Kind.NOTE) if "norm" in event.data]
    gone: set[int | None] = set()  # attempts of which a rank has ended
    for event in run.beside_steps:
        if event.kind is Kind.NOTE and "norm" in event.data and event is not norms[0]:
            continue
        if event.kind is Kind.HANG_OPINION and event.data["opinion"] not in ("learning", "active"):
            yield Moment(event.mono_s, on_one_line(_opinion(event)))
        line = None if event.kind in _ELSEWHERE or _is_empty(event, for_good) else narrator.tell(event)
        if line:
            last_s = norms[-1].mono_s - run.events[0].mono_s if len(norms) > 1 and event is norms[0] else None
            more = "" if last_s is None else f"; {len(norms) - 1} more such notes, the last at {last_s:.2f}"
            first = event.kind is Kind.RANK_EXITED and event.attempt not in gone
            gone |= {event.attempt} if first else set()
            yield (Turn if first or event.kind in _TURNS else Moment)(event.mono_s, line.text + more)


def _opinion(event: Event) -> str:
    seen = event.data
    detail = f": {seen['detail']}" if seen["detail"] else ""
    if seen["opinion"] == "blind":
        return f"the observer {seen['observer']} is blind{detail}"
    bound = f"no activity for {seen['quiet_s']:.1f} s, its bound is {seen['bound_s']:.1f} s"
    says = "says that the job hangs" if seen["opinion"] == "hangs" else seen["opinion"]
    return f"the observer {seen['observer']} {says} ({bound}){detail}"


def _of_history(run: Record) -> Iterator[Moment]:
    parts = run.of_replicas
    for number, part in enumerate(parts):
        who = f"replica {number}: " if len(parts) > 1 else ""
        for attempt in (*_attempts(part), *_saves(part), *_removals(part)):
            yield attempt._replace(text=f"{who}{attempt.text}")


def _is_empty(event: Event, for_good: set[str]) -> bool:
    """Whether the event is the rollback of a fault that can't be undone, such as a kill."""
    return event.kind is Kind.ROLLED_BACK and event.data["fault"] in for_good and bool(event.data["verified"])


def _attempts(run: Record) -> Iterator[Moment]:
    """Yields the time at which each attempt began to make steps, and at which it went back to an earlier state."""
    for attempt in run.history.attempts:
        first_s = run.history.executions.of_attempt(attempt.number).first_s()
        if first_s is not None:
            yield Turn(first_s - 1e-6, _beginning(run, attempt))
    for part in run.history.segments:
        first_s = run.history.of_segment(part.number, part.after).first_s()
        if first_s is None or part.base is None or run.history.begins_attempt(part):
            continue
        source = f", from {_loaded(run, part.loaded)}" if part.loaded else ""
        yield Turn(first_s - 1e-6, f"attempt {part.number} goes back to step {part.base}{source}")


def _beginning(run: Record, attempt: Attempt) -> str:
    who = f"attempt {attempt.number}"
    if attempt.base is None:
        return f"{who} makes steps, and their numbers are not known: {_disagreement(attempt)}"
    tried = failed_loads(run, attempt.number)
    unseen = f"and could not load {in_words(tried)}" if tried else "and no load of a checkpoint was seen"
    from_where = f"from {_loaded(run, attempt.loaded)}" if attempt.loaded else unseen
    if attempt.base == 0:
        where = f"step 1, {from_where}" if attempt.loaded or tried else "step 1"
        return f"{who} begins with {where}{_again(run, attempt)}"
    return f"{who} goes on after step {attempt.base}, {from_where}{_again(run, attempt)}{_conflicts(attempt)}"


def _loaded(run: Record, path: str) -> str:
    """The name of the loaded checkpoint to which a file belongs."""
    own = saved_as(path, run.history.saves)
    group = [save for save in run.history.saves if own and _when(save) == _when(own)]
    others = [save.path for save in run.history.saves if save not in group]
    points = points_of(run)
    return name_of_all([save.path for save in group if points.has(save.path)] or [path], others)


def _when(save: Save) -> tuple[int, int]:
    return save.attempt, save.local_step


def _again(run: Record, attempt: Attempt) -> str:
    before = [
        one.last_step for one in run.history.attempts if one.number < attempt.number and one.last_step is not None
    ]
    lost = max(before, default=0) - (attempt.base or 0)
    return f": {counted(lost, 'step')} to do again" if lost > 0 else ""


def _conflicts(attempt: Attempt) -> str:
    return f"; but {attempt.conflicts[0]}" if attempt.conflicts else ""


def _disagreement(attempt: Attempt) -> str:
    return attempt.conflicts[0] if attempt.conflicts else "neither a load nor a counter nor its data shows it"


def _saves(run: Record) -> Iterator[Moment]:
    points, every = points_of(run), run.history.saves
    beside = [save for save in every if save.ok and not points.has(save.path)]
    loaded = {family(load.path) for load in run.history.loads if load.ok}
    for saves in by_step(beside):
        place = saves[0].global_step
        after = f" after step {place}" if place is not None else ""
        ended_s, name = max(save.ended_s or 0.0 for save in saves), _name(saves)
        unused = "" if any(family(save.path) in loaded for save in saves) else "; the job does not resume from it"
        yield Moment(ended_s, f"{name} is saved{after}{unused}")
    for saves in by_step(save for save in every if save not in beside):
        others = [save.path for save in every if _when(save) != _when(saves[0])]
        step = f" of step {saves[0].global_step}" if saves[0].global_step is not None else ""
        unfinished = [save for save in saves if save.ended_s is None]
        bad = [save for save in saves if save.ended_s is not None and not save.ok]
        for save in unfinished:
            yield Turn(save.begun_s, f"a checkpoint{step} is begun, {_name([save])}, and never finished")
        for save in bad:
            yield Turn(save.ended_s or 0.0, f"a checkpoint{step}, {_name([save])}, could not be saved")
        if not unfinished and not bad:
            ended_s = max(save.ended_s or 0.0 for save in saves)
            yield Moment(ended_s, f"the checkpoint{step} is saved: {_name(saves, others)}{_other_number(saves)}")


def _removals(run: Record) -> Iterator[Moment]:
    """Yields each removed path once: for a folder, an event may exist for each of its files."""
    gone: dict[tuple[int | None, str], float] = {}
    for event in run.of_kind(Kind.REMOVED):
        gone.setdefault((event.attempt, checkpoint_of(str(event.data["path"]))), event.mono_s)
    for (attempt, path), at_s in gone.items():
        yield Moment(at_s, f"attempt {attempt or 0} removes {posixpath.basename(path)}")


def _other_number(saves: Sequence[Save]) -> str:
    """A remark if the number in the checkpoint's name is not its step. One of the two must be wrong."""
    named, step = number_in_name(_name(saves)), saves[0].global_step
    return "" if None in (named, step) or named == step else f", a name that says {named}"


def _name(saves: Sequence[Save], others: Sequence[str] | None = None) -> str:
    return name_of_all([save.path for save in saves], others)


def _with_steps(run: Record, moments: Sequence[Moment]) -> Iterator[Moment]:
    """Inserts before each line the steps that ended since the line before."""
    steps = _once_each(run.history.executions)
    at = 0
    for moment in moments:
        done = at
        while done < len(steps) and steps[done].mono_s <= moment.at_s:
            done += 1
        yield from _finished(steps[at:done])
        at = done
        yield moment
    yield from _finished(steps[at:])


def _once_each(executions: Executions) -> list[Execution]:
    """Each step of each attempt, at the time when the first rank finished it, with the loss of the lowest rank."""
    steps = executions.at(np.lexsort((executions.rank, executions.local_step, executions.attempt)))
    new = np.append(True, (np.diff(steps.attempt) != 0) | (np.diff(steps.local_step) != 0))[: len(steps)]
    starts = np.flatnonzero(new)
    over_s = np.minimum.reduceat(steps.mono_s, starts) if len(starts) else steps.mono_s
    first = [replace(one, mono_s=at_s) for one, at_s in zip(steps.at(starts), over_s.tolist(), strict=True)]
    return sorted(first, key=lambda one: one.mono_s)


def _finished(steps: Sequence[Execution]) -> Iterator[Moment]:
    if not steps:
        return
    numbers = sorted(
        {execution.global_step if execution.global_step is not None else execution.local_step for execution in steps}
    )
    unknown = " of the attempt, not placed" if any(execution.global_step is None for execution in steps) else ""
    subject = f"step {numbers[0]} is" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]} are"
    yield Moment(steps[-1].mono_s, f"{subject} done{unknown}{_losses(steps)}")


def _losses(steps: Sequence[Execution]) -> str:
    seen = [execution.losses[-1] for execution in steps if execution.loss_seen]
    texts = [f"{loss:.4g}" for loss in seen if loss is not None]
    if not texts:
        return ""
    return f" (loss {texts[0]})" if len(texts) == 1 else f" (loss {texts[0]} to {texts[-1]})"
