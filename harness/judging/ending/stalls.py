"""The times during which faults held up a job, and what the observers of hangs could see of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.ending.hung import hang_at_end
from torchaos.harness.record.record import Record
from torchaos.harness.watching.observers.opinion import PROGRESS


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
    """The hang of an attempt that was started after `since_s`: one in which the run ended, or one that was declared and
    after which the attempt made no step."""
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
    """Why the observers could not tell that the job hung, as a clause: one of them was blind, or the stall was shorter
    than the pauses that are usual in this job. None if they could have told, or if their opinions are not known."""
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
    if bounds and not silent and (lasted := stall.until_s - stall.since_s) < min(bounds):
        return f"it lasted {lasted:.2f} s, and after the usual pauses of this job they need {min(bounds):.2f} s"
    return None


def why_unread(run: Record, stall: Stall) -> str | None:
    """Why the diagnosis had no stacks of the ranks, as a clause; None if it had, or if that is not known."""
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
