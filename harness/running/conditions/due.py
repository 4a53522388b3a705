"""Decides whether a trigger that is seen from outside is due. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.recovery.caught_up import has_settled, went_on
from torchaos.harness.record.events.merged import Merged, RunEvents
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import After


def after_is_due(
    trigger: After, events: Sequence[Event], now_s: float, history: Callable[[], History] | None = None
) -> bool:
    """Whether the trigger is due. `now_s`: CLOCK_MONOTONIC. `history`: the history of these events, for a caller that
    checks several triggers."""
    whole = Merged.of(events)
    if now_s < _launched_at(whole.beside_steps) + trigger.not_before_s:  # the cheapest check comes first
        return False
    start = _start_of(trigger, whole, history or partial(History.of, whole))
    if start is None:
        return False
    if trigger.checkpoints:
        saves = {  # a checkpoint may have several files
            (e.attempt, e.step): e.mono_s
            for e in whole.beside_steps
            if e.kind is Kind.SAVE_END and e.data["ok"] and e.rank == 0 and e.mono_s >= start
        }
        if len(saves) < trigger.checkpoints:
            return False
        start = list(saves.values())[trigger.checkpoints - 1]
    return now_s >= start + trigger.delay_s


def _launched_at(events: Sequence[Event]) -> float:
    return next((event.mono_s for event in events if event.kind is Kind.JOB_STARTED), math.inf)


def _start_of(trigger: After, whole: Merged, history: Callable[[], History]) -> float | None:
    events = whole.beside_steps
    if trigger.fault is None:
        launched = _launched_at(events)
        return launched if launched < math.inf else None
    hits = [e for e in events if e.kind is Kind.APPLYING and e.data["fault"] == trigger.fault]
    if not hits:
        missed = (e.mono_s for e in events if e.kind is Kind.MISSED and e.data["fault"] == trigger.fault)
        return next(missed, None) if trigger.state == "recovered" else None  # there is nothing to recover from
    at, pids = hits[0].mono_s, {hit.data["pid"] for hit in hits}
    if trigger.state == "applied":
        return at
    back = next((e.mono_s for e in events if e.kind is Kind.ROLLED_BACK and e.data["fault"] == trigger.fault), None)
    if trigger.state == "rolled_back":
        return back
    if trigger.state == "felt":
        return next(
            (e.mono_s for e in events if e.kind is Kind.RANK_EXITED and e.data["pid"] in pids and e.mono_s >= at), None
        )
    if (trigger.lasting and back is None) or not _stepped_since(whole, at, trigger.lethal):
        return None
    recovered = _recovered_at(Seen(whole, history()), trigger)
    return None if recovered is None else max(recovered, back or recovered) if trigger.lasting else recovered


@dataclass(frozen=True)
class Seen(RunEvents):
    """What is known about the run so far."""

    events: Sequence[Event]
    history: History


def _stepped_since(whole: Merged, at: float, lethal: bool) -> bool:
    """Whether a step has ended since the fault. Without such a step the job has not recovered, and the costly history
    is not needed."""
    steps = whole.steps_made
    hit = steps.at(steps.mono_s <= at).attempt.max(initial=0)  # or a later one
    logged = (event for event in whole.beside_steps if event.kind is Kind.LOG_STEP and event.mono_s > at)
    return bool((steps.after(at).attempt > (hit if lethal else -1)).any()) or any(
        not lethal or event.attempt is None or event.attempt > hit for event in logged
    )


def _recovered_at(seen: Seen, trigger: After) -> float | None:
    """The time (CLOCK_MONOTONIC) at which the job had recovered from the fault, counted from the first landing. The
    rules are those of the verdict; also, if the fault left the attempt alive, some more steps must have ended in it.
    None if the job has not recovered."""
    landing = next(landed for landed in landings(seen) if landed.fault == trigger.fault)
    end = went_on(seen, landing, lethal=trigger.lethal, lasting=trigger.lasting)
    if end is None or (end.attempt == landing.attempt and not has_settled(seen.history, end)):
        return None
    return end.mono_s
