"""Hangs of a job. Pure. If the run had to end a hung job: how it hung, shown by what its ranks did at that moment. For
each fault that held up the job: for how long, and whether the observers of hangs could see it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchaos.harness.analysis.caught_up import pace_of
from torchaos.harness.monitoring.diagnosis.wait_graph import ranges
from torchaos.harness.monitoring.observers.hang_detectors import PROGRESS, Rule
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record

# Signs of life of a rank, beside its steps.
_SIGNS = frozenset({
    Kind.RANK_UP, Kind.AGENT_STARTED, Kind.GROUP_JOINED, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN, Kind.LOAD_END,
    Kind.LOG_STEP, Kind.LOSS,
})  # fmt: skip
_LEAST_S, _PAUSES = 5.0, 3.0  # a hang is longer than this, and than this many times the longest usual pause
_LEAST_AT_START_S = 20.0  # before the first step of a job, it is not known what is usual
_MOST = 4  # the most groups of ranks that do the same and are named
_LOOK_S = 1.0  # seconds that the observers need to read stacks and counters


@dataclass(frozen=True)
class Hang:
    """A hang at the end of a run. `since_s`: the last sign of life of its ranks, CLOCK_MONOTONIC."""

    attempt: int
    since_s: float
    words: str


def hang_at_end(run: Record) -> Hang | None:
    """The hang in which the run ended the job. None if the job ended by itself, or may just have been slow, or if
    nothing was recorded about its ranks."""
    found = list(run.of_kind(Kind.HANG_AT_END))
    if not found or not run.history.attempts:
        return None
    end, attempt = found[-1], run.history.attempts[-1]
    ranks = [one for one in end.data["ranks"] if isinstance(one.get("rank"), int) and isinstance(one.get("verb"), str)]
    since_s = _last_sign(run, attempt, end)
    if not ranks or end.mono_s - since_s < _bound_s(run, attempt):
        return None
    waits = any(one.get("waits") is True for one in ranks)
    lasted = f"{end.mono_s - since_s:.0f} s"
    what = "hung" if waits else f"did not go on for its last {lasted},"
    words = f"attempt {attempt.number} {what} {_where(run, attempt)}; {ranks_in_words(ranks)}"
    gone = {rank: code for rank, code in attempt.exit_codes.items() if rank not in {one["rank"] for one in ranks}}
    for rank, code in gone.items():
        words += f", rank {rank} is gone{'' if code is None else f' (exit code {code})'}"
    culprits = set(end.data["culprits"]) - gone.keys()
    if waits and culprits and len(culprits) < len(ranks):
        words += f"; {ranges(sorted(culprits))} held up the other{'s' if len(ranks) - len(culprits) > 1 else ''}"
    return Hang(attempt.number, since_s, words + _unread(end, ranks))


def ranks_in_words(ranks: Sequence[dict[str, object]]) -> str:
    """What each rank does, such as `rank 0 waits in barrier, ranks 1, 2 are busy in train at train.py:7`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in ranks:
        rank = one.get("rank")
        if isinstance(rank, int):
            groups.setdefault((str(one.get("verb", "")), str(one.get("where", ""))), []).append(rank)
    words, before = [], ""
    for (verb, where), members in list(groups.items())[:_MOST]:
        said = verb if len(members) == 1 else _plural(verb)
        words.append(" ".join(filter(None, (ranges(members), "" if said == before and where else said, where))))
        before = said
    left = sum(map(len, list(groups.values())[_MOST:]))
    return ", ".join([*words, *([f"and {counted(left, 'more rank')} elsewhere"] if left else [])])


def _plural(verb: str) -> str:
    return f"are{verb[2:]}" if verb.startswith("is ") else verb.removesuffix("s")


def _last_sign(run: Record, attempt: Attempt, end: Event) -> float:
    steps_s = run.history.executions.of_attempt(attempt.number).last_s()
    signs = [e.mono_s for e in run.beside_steps if e.kind in _SIGNS and e.attempt == attempt.number]
    return max([attempt.started_s, *([] if steps_s is None else [steps_s]), *(at for at in signs if at <= end.mono_s)])


def _bound_s(run: Record, attempt: Attempt) -> float:
    """The bound in seconds: a job without a sign of life for longer hangs. It follows from the usual pauses between
    steps or, for an attempt without a step, from the starts of the other attempts."""
    if len(run.history.executions.of_attempt(attempt.number)):
        return max(_LEAST_S, _PAUSES * _longest_pause_s(run))
    starts = [
        first_s - other.started_s
        for other in run.history.attempts
        if (first_s := run.history.executions.of_attempt(other.number).first_s()) is not None
    ]
    return max([_LEAST_S, *starts] if starts else [_LEAST_AT_START_S])


def _longest_pause_s(run: Record) -> float:
    """The longest time between two steps of a rank in an attempt, before the first fault if steps were made then."""
    first_s = min((event.mono_s for event in run.of_kind(Kind.APPLYING)), default=float("inf"))
    steps = run.history.executions
    calm = steps.at(steps.mono_s <= first_s)
    steps = calm if len(calm) > 1 else steps
    ordered = steps.at(np.lexsort((steps.mono_s, steps.rank, steps.attempt)))
    same = (np.diff(ordered.rank) == 0) & (np.diff(ordered.attempt) == 0)
    return float(np.diff(ordered.mono_s)[same].max(initial=0.0))


def _where(run: Record, attempt: Attempt) -> str:
    saves = any(save.attempt == attempt.number and save.ended_s is None for save in run.history.saves)
    inside = ", in a save" if saves else ", in a load" if _is_loading(run, attempt) else ""
    if not len(run.history.executions.of_attempt(attempt.number)):
        return f"before its first step{inside}"
    return (f"after step {attempt.last_step}" if attempt.last_step is not None else "after some steps") + inside


def _is_loading(run: Record, attempt: Attempt) -> bool:
    own = [event for event in run.beside_steps if event.attempt == attempt.number]
    begun = [event.rank for event in own if event.kind is Kind.LOAD_BEGIN]
    ended = [event.rank for event in own if event.kind is Kind.LOAD_END]
    return any(begun.count(rank) > ended.count(rank) for rank in begun)


def _unread(end: Event, ranks: Sequence[dict[str, object]]) -> str:
    unread = [rank for one in ranks if not one.get("where") and isinstance(rank := one.get("rank"), int)]
    return f"; the stacks of {ranges(unread)} could not be had" if unread else ""


@dataclass(frozen=True)
class Stall:
    """The time for which a fault may hold up the job: from its application until its rollback, the end of the processes
    that it hit, the next fault, or the end of the run, whichever comes first. If the recovery from the fault hung, the
    time of that hang; nobody knows which ranks are to blame for it. Times are CLOCK_MONOTONIC."""

    fault: str
    ranks: frozenset[int]
    since_s: float
    until_s: float
    died: bool = False  # the stall ended because the processes ended
    attempt: int | None = None  # if the recovery hung: the attempt that hung

    @property
    def name(self) -> str:
        return self.fault if self.attempt is None else f"the hang of attempt {self.attempt} after {self.fault}"


def stalls_of(run: Record) -> Iterator[Stall]:
    """The stalls in order of time. A fault that hits several ranks at once makes one stall; a fault that is applied
    again after its rollback makes another."""
    starts: list[tuple[str, float, set[int]]] = []
    for hit in run.of_kind(Kind.APPLYING):
        ranks = {hit.rank} if hit.rank is not None else set()
        if (
            starts
            and starts[-1][0] == hit.data["fault"]
            and not _taken_back(run, starts[-1][0], starts[-1][1], hit.mono_s)
        ):
            starts[-1][2].update(ranks)
        else:
            starts.append((hit.data["fault"], hit.mono_s, set(ranks)))
    end = run.events[-1].mono_s if run.events else 0.0
    for number, (fault, since, ranks) in enumerate(starts):
        back = [e.mono_s for e in run.of_fault(fault, Kind.ROLLED_BACK) if e.mono_s > since]
        following = [start for _, start, _ in starts[number + 1 :]]
        exited = [e.mono_s for e in run.of_kind(Kind.JOB_EXITED) if e.mono_s > since]
        until = min([*back, *following, *exited, end])
        gone = _gone_at(run, fault, since)
        hang = _hang_after(run, fault, gone, until) if gone < until else None
        yield hang or Stall(fault, frozenset(ranks), since, min(until, gone), died=gone < until)


def _hang_after(run: Record, fault: str, since_s: float, until_s: float) -> Stall | None:
    """The hang of an attempt that was started after `since_s`: the run ended in this hang, or the hang was declared and
    the attempt made no further step."""
    hung = hang_at_end(run)
    for attempt in run.history.attempts:
        if not since_s <= attempt.started_s < until_s:
            continue
        last_s = run.history.executions.of_attempt(attempt.number).last_s() or 0.0
        over_s = min(until_s, attempt.ended_s or until_s)
        declared = [e for e in run.of_kind(Kind.HANG_DECLARED) if max(attempt.started_s, last_s) < e.mono_s <= over_s]
        began = [float(declared[0].data["since_s"])] if declared else []
        began += [hung.since_s] if hung and hung.attempt == attempt.number else []
        if began:
            return Stall(fault, frozenset(), max(attempt.started_s, min(began)), over_s, attempt=attempt.number)
    return None


def why_unseen(run: Record, stall: Stall) -> str | None:
    """A clause: why the observers could not tell that the job hung. Either one of them was blind, or nothing had shown
    yet which pauses are usual in this job, or the stall was shorter than such pauses. None if they could have told, or
    if their opinions are not known."""
    last = _opinions(run, stall)
    said = {name: str(event.data["opinion"]) for name, event in last.items()}
    blind = [f"{name} ({last[name].data['detail']})" for name, word in said.items() if word == "blind"]
    progress = [last[name] for name in sorted(PROGRESS & said.keys()) if said[name] not in ("blind", "learning")]
    if last and not progress:
        return "neither the log nor the stamps had shown yet which pauses are usual in this job"
    silent = [event for event in progress if event.data["opinion"] == "hangs"]
    if silent and blind:
        others = [
            f"{name} {said[name]} ({last[name].data['detail']})" for name in sorted(said.keys() - PROGRESS)
            if said[name] != "blind"
        ]  # fmt: skip
        return f"these were blind: {', '.join(blind)}" + (f"; the others: {', '.join(others)}" if others else "")
    bounds = [float(event.data["bound_s"]) for event in progress]
    return too_short(run, stall) if bounds and not silent and stall.until_s - stall.since_s < min(bounds) else None


def too_short(run: Record, stall: Stall) -> str | None:
    """A clause: the stall was shorter than the observers need to tell a hang from the usual pauses of this job, and
    what to do. None if it was not."""
    lasted_s, needed_s = stall.until_s - stall.since_s, _needed_s(run, stall)
    if lasted_s >= needed_s:
        return None
    needed = f"they need {needed_s:.2f} s to tell a hang from the usual pauses of this job"
    return f"it lasted only {lasted_s:.2f} s, and {needed}; {let_it_last(run, stall, needed_s)}"


def let_it_last(run: Record, stall: Stall, longer_than_s: float) -> str:
    """A clause that advises what to write so that the stall lasts longer than this many seconds."""
    enough = 5 * math.floor(longer_than_s / 5) + 5
    planned = next((one for one in run.plan.faults if one.id == stall.fault), None)
    return f"write `for: {enough}s`" if planned and planned.duration_s else f"let it last {enough} s"


def _needed_s(run: Record, stall: Stall) -> float:
    """The shortest stall, in seconds, that the observers declare as a hang in this job: by the bounds that they had in
    the stall, and by the pauses between the steps before the first fault."""
    seen = [event for name, event in _opinions(run, stall).items() if name in PROGRESS]
    bounds = [float(event.data["bound_s"]) for event in seen if event.data["opinion"] not in ("blind", "learning")]
    rule, first_s = Rule(), min((event.mono_s for event in run.of_kind(Kind.APPLYING)), default=stall.since_s)
    return max(rule.floor_s, rule.k * pace_of(run.history, first_s).longest_s, min(bounds, default=0.0)) + _LOOK_S


def why_unread(run: Record, stall: Stall) -> str | None:
    """A clause: why the diagnosis had no stacks of the ranks. None if it had stacks, or if that is not known."""
    stacks = _opinions(run, stall).get("stacks")
    return str(stacks.data["detail"]) if stacks and stacks.data["opinion"] == "blind" else None


def _opinions(run: Record, stall: Stall) -> dict[str, Event]:
    """The last opinion of each observer in the stall."""
    return {
        str(event.data["observer"]): event
        for event in run.of_kind(Kind.HANG_OPINION)
        if event.mono_s <= stall.until_s
    }  # fmt: skip


def _gone_at(run: Record, fault: str, since_s: float) -> float:
    """The time at which the last process that the fault hit was gone. If it hit no rank: the time at which the last
    rank that was alive at `since_s` was gone. Infinite if some of these processes did not end."""
    hit = {e.data["pid"] for e in run.of_fault(fault, Kind.APPLYING) if e.rank is not None and e.mono_s >= since_s}
    exits = {e.data["pid"]: e.mono_s for e in run.of_kind(Kind.RANK_EXITED)}
    there = {
        e.data["pid"] for e in run.of_kind(Kind.RANK_UP) if e.mono_s <= since_s < exits.get(e.data["pid"], math.inf)
    }
    return max((exits.get(pid, math.inf) for pid in hit or there), default=math.inf)


def _taken_back(run: Record, fault: str, since_s: float, until_s: float) -> bool:
    return any(since_s < event.mono_s < until_s for event in run.of_fault(fault, Kind.ROLLED_BACK))
