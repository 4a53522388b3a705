"""A finished job that aborted on its way out.

A process group that was not destroyed makes the interpreter abort at exit (SIGABRT, "terminate called without an active
exception"). torchrun then starts a job again that was done, and a trainer that resumes at its last step may train one
step more. It is torch's doing (pytorch/pytorch#190489). Where the job's final checkpoint is verified, it is counted and
set aside: what came after it is left out of the judgement. Where it is not, it is a failure like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.checkpoints.contents import checkpoints_of
from torchaos.harness.judging.landing.landings import Told
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.record import Record

ABORT = -6
_LINE = "terminate called without an active exception"


@dataclass(frozen=True)
class TeardownAbort:
    attempt: int
    rank: int
    last_step: int  # the step that the job had finished with


def teardown_aborts(record: Record, final_step: int | None = None) -> list[TeardownAbort]:
    """Those that are set aside: the final checkpoint, of that step or a later one, is there and whole."""
    found = aborts_at_exit(record, final_step)
    return [one for one in found if _is_verified(record, one)]


def aborts_at_exit(told: Told, final_step: int | None = None) -> list[TeardownAbort]:
    """The attempts that had done their last step when a rank aborted at interpreter exit, set aside or not.

    `final_step` is where the job ends, when that is known; otherwise an attempt was done when no later one got more
    than a step further."""
    highest = told.history.highest_step() or 0
    found = []
    for attempt in told.history.attempts:
        last = attempt.last_step if attempt.last_step is not None else attempt.base
        if last is None or last < (highest - 1 if final_step is None else final_step):
            continue
        codes = attempt.exit_codes
        aborted = [rank for rank in codes if codes[rank] == ABORT and _at_exit(told, attempt, rank)]
        if aborted and not any(code is not None and code > 0 for code in codes.values()):
            found.append(TeardownAbort(attempt.number, aborted[0], last))
    return found


def has_aborted(events: Iterable[Event]) -> bool:
    """Whether it takes a look at the final checkpoint to judge this run, whatever is asserted."""
    ends = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)
    return any(event.kind in ends and event.data["exit_code"] == ABORT for event in events)


def final_step(record: Record) -> int | None:
    """The step with which the job was done: before any abort on the way out."""
    aborts = teardown_aborts(record)
    return aborts[0].last_step if aborts else record.history.last_step


def _is_verified(record: Record, abort: TeardownAbort) -> bool:
    kept = checkpoints_of(record)
    newest = kept[-1] if kept else None
    return newest is not None and newest.good and newest.step is not None and newest.step >= abort.last_step


def _at_exit(told: Told, attempt: Attempt, rank: int) -> bool:
    """The agent saw the interpreter end, or the job's log has the line, before the process was gone."""
    process = attempt.ranks[rank]
    gone_s = float("inf") if process.exited_s is None else process.exited_s
    if any(e.rank == rank and e.attempt == attempt.number for e in told.events if e.kind is Kind.AGENT_ENDED):
        return True
    own = [one.mono_s for one in told.history.executions if one.attempt == attempt.number]
    since_s = max(own, default=attempt.started_s)
    lines = [e.mono_s for e in told.events if e.kind is Kind.LOG_CAUSE and _LINE in str(e.data["line"])]
    return any(since_s <= at <= gone_s + 1.0 for at in lines)  # the log is read a little after the fact
