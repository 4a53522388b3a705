"""When a trigger that is seen from outside has come. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.history import History
from torchaos.harness.plan import After


def after_is_due(
    trigger: After, events: Sequence[Event], now_s: float, history: Callable[[], History] | None = None
) -> bool:
    """`now_s` is CLOCK_MONOTONIC. `history`: that of these events, for who asks of several triggers."""
    if now_s < _launched_at(events) + trigger.not_before_s:  # first what is cheap to tell
        return False
    start = _start_of(trigger, events, history or partial(History.of, events))
    if start is None:
        return False
    if trigger.checkpoints:
        saves = [
            e.mono_s for e in events if e.kind is Kind.SAVE_END and e.data["ok"] and e.rank == 0 and e.mono_s >= start
        ]
        if len(saves) < trigger.checkpoints:
            return False
        start = saves[trigger.checkpoints - 1]
    return now_s >= start + trigger.delay_s


def _launched_at(events: Sequence[Event]) -> float:
    return next((event.mono_s for event in events if event.kind is Kind.JOB_STARTED), math.inf)


def _start_of(trigger: After, events: Sequence[Event], history: Callable[[], History]) -> float | None:
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
    if (trigger.lasting and back is None) or not _stepped_since(events, at, trigger.lethal):
        return None
    recovered = _recovered_at(history(), hits, trigger.lethal)
    return None if recovered is None else max(recovered, back or recovered) if trigger.lasting else recovered


def _stepped_since(events: Sequence[Event], at: float, lethal: bool) -> bool:
    """Without such a step nobody has recovered, and the history, which is dear, need not be asked."""
    steps = [event for event in events if event.kind in (Kind.STEP, Kind.LOG_STEP)]
    seen = [step.attempt or 0 for step in steps if step.mono_s <= at and step.kind is Kind.STEP]
    hit = max(seen, default=0)  # or a later one
    return any(step.mono_s > at and (not lethal or step.attempt is None or step.attempt > hit) for step in steps)


def _recovered_at(history: History, hits: Sequence[Event], lethal: bool) -> float | None:
    """The first step beyond all before: of the very rank that was hit, where it lives on (of any, where a node, a file
    or an endpoint was hit), else of a later attempt. What a rank still does before it dies of it is none, nor is the
    step that was under way where the attempt did not last."""
    at, ranks, hit = hits[0].mono_s, {one.rank for one in hits}, history.attempt_at(hits[0].mono_s)
    number = hit.number if hit else 0
    before = (history.highest_step(before_s=at) or 0) + any(one.number > number for one in history.attempts)
    reached = max((one.last_step or 0 for one in history.attempts if one.number <= number), default=0)
    anybody = ranks <= {None} or history.source == "log"
    for one in history.executions:
        lives_on = not lethal and one.attempt == number and (anybody or one.rank in ranks)
        if lethal and one.attempt <= number:
            continue
        if one.mono_s > at and (one.global_step or 0) > (before if lives_on else reached):
            return one.mono_s
    return None
