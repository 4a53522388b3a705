"""Describes how a job ended, by the exit code of its command and of its ranks."""

from __future__ import annotations

import signal
from typing import NamedTuple

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.ending.teardown import ABORT, aborts_at_exit, teardown_aborts
from torchaos.harness.record.record import Record

_ASKED = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}  # the rank was asked to end
_FAILURES = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)


class FailedRank(NamedTuple):
    """A rank that failed by itself."""

    rank: int
    exit_code: int  # negative: the signal that killed it


def ended_on_purpose_s(run: Record) -> float | None:
    """The time (CLOCK_MONOTONIC) at which torchaos ended the run on purpose, by `until`. None if torchaos did not end
    it on purpose."""
    return next((event.mono_s for event in run.of_kind(Kind.STOPPED) if event.data.get("enough")), None)


def own_exit_code(run: Record) -> int | None:
    """The exit code with which the job ended by itself; 0 if the job was finished and aborted only at interpreter exit
    (see teardown.py). None if torchaos ended the job, or if the job was or would have been submitted again."""
    exited, started = run.exited, list(run.of_kind(Kind.JOB_STARTED))
    if not exited or (run.stopped and run.stopped.mono_s <= exited.mono_s):
        return None
    if started[-1:] and started[-1].mono_s > exited.mono_s:
        return None
    aborts = teardown_aborts(run)
    done = bool(aborts) and aborts[-1].attempt == run.history.attempts[-1].number
    code: int | None = 0 if done else run.exit_code
    goes_on = code != 0 and run.ended_on_purpose and len(started) <= run.plan.job.resubmit_times
    return None if goes_on else code


def failed_rank(run: Record) -> FailedRank | None:
    """The first rank that failed by itself, in the last attempt of a job that ended by itself. None if no rank did. Not
    counted: a rank that torchelastic ended, and an abort at interpreter exit after the last step. The exit code of the
    job's command is not enough, because in a pipe it is the exit code of the last command."""
    exited = run.exited
    if not run.history.attempts or not exited or run.stopped:
        return None
    last = run.history.attempts[-1]
    fine = {0, None} | ({ABORT} if last.number in {abort.attempt for abort in aborts_at_exit(run)} else set())
    ranks = {process.pid: rank for rank, process in last.ranks.items() if process.pid is not None}
    for event in run.of_kind(*_FAILURES):
        code, rank = event.data["exit_code"], ranks.get(event.data["pid"])
        if rank is None or code in fine or event.mono_s < last.started_s or event.mono_s > exited.mono_s:
            continue
        if event.kind is Kind.ELASTIC_FAILURE or not (code in _ASKED or _was_ended(run, event)):
            return FailedRank(rank, code)
    return None


def _was_ended(run: Record, left: Event) -> bool:
    """Whether torchelastic had ended the process before it exited."""
    return any(
        event.data["pid"] == left.data["pid"] and event.mono_s <= left.mono_s
        for event in run.of_kind(Kind.ELASTIC_TEARDOWN)
    )
