"""Recognizes a finished job that aborted at interpreter exit.

A process group that was not destroyed can make the interpreter abort at exit (SIGABRT, "terminate called without an
active exception"). torchrun then restarts a job that was finished, and a trainer that resumes at its last step may
train one more step. This is a defect of torch (pytorch/pytorch#190489). If the job's final checkpoint is whole, the
abort is counted, and everything after it is not judged. Otherwise it is a failure like any other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.checkpoints.contents import checkpoints_of
from torchaos.harness.judging.landing.landings import RunSoFar
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.record import Record

ABORT = -6
_LINE = "terminate called without an active exception"


@dataclass(frozen=True)
class TeardownAbort:
    """An abort of a rank at interpreter exit, after the last step."""

    attempt: int
    rank: int
    last_step: int  # global; the last step that the attempt finished


def teardown_aborts(record: Record, final_step: int | None = None) -> list[TeardownAbort]:
    """The aborts at interpreter exit that are not judged, because a whole checkpoint of the last step or a later step
    exists."""
    found = aborts_at_exit(record, final_step)
    return [abort for abort in found if _is_verified(record, abort)]


def aborts_at_exit(run: RunSoFar, final_step: int | None = None) -> list[TeardownAbort]:
    """All attempts in which a rank aborted at interpreter exit after the job's last step; at most one abort per
    attempt. `final_step`: that step's global number. Without it, an attempt counts as having reached the end if no
    attempt got more than one step further."""
    highest = run.history.highest_step() or 0
    found = []
    for attempt in run.history.attempts:
        last = attempt.last_step if attempt.last_step is not None else attempt.base
        if last is None or last < (highest - 1 if final_step is None else final_step):
            continue
        codes = attempt.exit_codes
        aborted = [rank for rank in codes if codes[rank] == ABORT and _at_exit(run, attempt, rank)]
        if aborted and not any(code is not None and code > 0 for code in codes.values()):
            found.append(TeardownAbort(attempt.number, aborted[0], last))
    return found


def has_aborted(events: Iterable[Event]) -> bool:
    """Whether a rank ended with SIGABRT. Then the final checkpoint must be inspected, for every set of assertions."""
    ends = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)
    return any(event.kind in ends and event.data["exit_code"] == ABORT for event in events)


def final_step(record: Record) -> int | None:
    """The last global step of the job. If an abort at interpreter exit is not judged, steps after it do not count."""
    aborts = teardown_aborts(record)
    return aborts[0].last_step if aborts else record.history.last_step


def _is_verified(record: Record, abort: TeardownAbort) -> bool:
    checkpoints = checkpoints_of(record)
    newest = checkpoints[-1] if checkpoints else None
    return newest is not None and newest.good and newest.step is not None and newest.step >= abort.last_step


def _at_exit(run: RunSoFar, attempt: Attempt, rank: int) -> bool:
    """Whether a rank aborted at interpreter exit: its agent saw the interpreter end, or the job's log has the line of
    the abort after the rank's last step."""
    process = attempt.ranks[rank]
    gone_s = float("inf") if process.exited_s is None else process.exited_s
    if any(e.rank == rank and e.attempt == attempt.number for e in run.of_kind(Kind.AGENT_ENDED)):
        return True
    since_s = run.history.executions.of_attempt(attempt.number).last_s() or attempt.started_s
    lines = [e.mono_s for e in run.of_kind(Kind.LOG_CAUSE) if _LINE in str(e.data["line"])]
    return any(since_s <= at <= gone_s + 1.0 for at in lines)  # the log is read a little later
