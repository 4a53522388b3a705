"""Finds out how a job ended: successfully, with an error, by an abort during its shutdown, without a restart, before
its first step, or unable to load a checkpoint. Input: a record. Output: exit codes, failed ranks, and clauses for
reasons, with the error's own words from the last lines of the log.

A process group that was not destroyed can make the interpreter of a finished job abort at exit (SIGABRT, "terminate
called without an active exception"). torchrun then restarts a job that was finished, and a trainer that resumes at its
last step may train one more step. This is a defect of torch (pytorch/pytorch#190489). If the job's final checkpoint is
whole, the abort is counted, and everything after it is not judged. Otherwise it is a failure like any other."""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of, is_below, root_of
from torchaos.harness.analysis.hit_targets import RunSoFar
from torchaos.harness.interfaces import Finding, inconclusive, passed
from torchaos.harness.monitoring.probes.job_log import BY_NAME, cause_of
from torchaos.harness.monitoring.probes.log_adapters import without_ansi
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import checkpoint_of
from torchaos.harness.record.history import Attempt, Load
from torchaos.harness.record.history.saves_and_loads import is_failed
from torchaos.harness.record.plan import enumerated, last_words_in_words
from torchaos.harness.record.record import RANK_FAILED, Record

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


def last_step_of(twins: Sequence[Record]) -> int | None:
    """The step in which the twin ended. None: not known, or there is no twin."""
    return final_step(twins[0]) if twins else None


def final_step(record: Record) -> int | None:
    """The last global step; if the job aborted at interpreter exit, the last one before that abort."""
    aborts = teardown_aborts(record)
    return aborts[0].last_step if aborts else record.history.last_step


def twins_end_apart(run: Record, twins: Sequence[Record]) -> str:
    """A clause: it is not known in which step the job should end, because its twins ended in different steps. Empty if
    they did not, or if the job did not end well."""
    ends = sorted({last for twin in twins if (last := final_step(twin)) is not None})
    if len(ends) < 2 or own_exit_code(run) != 0:
        return ""
    return f"the twins ended in different steps, too ({enumerated(ends)}): it may be chance when this job stops"


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


def ended_from_outside(run: Record) -> bool:
    """Whether the run was ended while its job was running, for a reason that says nothing about the job: by a person,
    or because of the machine. Then unfinished work is no failure of the job."""
    stopped, exited = run.stopped, run.exited
    if stopped is None or stopped.data.get("enough") or not stopped.data.get("interrupted", True):
        return False
    return exited is None or stopped.mono_s <= exited.mono_s


LEFT_OPEN = "not judged, because the run was ended early"


def own_exit_code(run: Record) -> int | None:
    """The exit code with which the job ended by itself; 0 if the job was finished and aborted only at interpreter exit
    (see above). None if torchaos ended the job, or if the job was submitted again, or would have been."""
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


def ends_so_without_fault(run: Record) -> bool:
    """Whether the job ended with the same exit code and last step as in a run without faults."""
    twins = [event.data["twin"] for event in run.of_kind(Kind.NOTE) if "twin" in event.data]
    return [own_exit_code(run), run.history.last_step] in twins


def timed_out(run: Record) -> bool:
    """Whether torchaos ended the job because its time-out was over."""
    return bool(run.stopped and run.stopped.data.get("timed_out"))


def never_ends_in_time(run: Record) -> str:
    """A clause: the job ran into its time-out, as it also does without a fault. Empty if not."""
    twins = [event.data["twin"] for event in run.of_kind(Kind.NOTE) if "twin" in event.data]
    if not timed_out(run) or not any(code is None for code, _last in twins):
        return ""
    return (
        f"the job's time-out of {run.plan.job.timeout_s:g} s is too short: the fault-free twin did not end within it "
        "either; write a longer job.timeout"
    )


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
    """Whether torchelastic had begun to stop this process before its exit, which is the event `left`."""
    return any(
        event.data["pid"] == left.data["pid"] and event.mono_s <= left.mono_s
        for event in run.of_kind(Kind.ELASTIC_TEARDOWN)
    )


def not_restarted(run: Record, then: str) -> Finding:
    """The finding for a job that was not restarted. Passed if the only attempt succeeded and no other attempt can have
    been missed; otherwise inconclusive.

    `then`: the end of the sentence "the job was not restarted, …"."""
    if sum(1 for _ in run.of_kind(Kind.JOB_STARTED)) > 1:
        return inconclusive("the job was started again, and only one attempt was seen")
    if run.history.source != "agent" and not any(run.of_kind(Kind.AGENT_STARTED)):
        return inconclusive("one attempt was seen, and without an agent it is not known whether there were others")
    code = run.exit_code
    if not run.ended_on_purpose and code != 0:
        how = "nobody saw how it ended" if code is None else f"ended with exit code {code}"
        return inconclusive(f"the job was not restarted, and {how}: there is no resume to judge")
    back = next((part for part in reversed(run.history.segments) if part.after and part.in_memory), None)
    if back and back.base is not None:
        then = f"and went back to step {back.base} in memory: this assertion does not judge with which state"
    return passed(f"the job was not restarted, {then}", resumes=0)


_MOST_LINES, _LONGEST = 5, 200  # lines; characters of a line
_LOGGED = re.compile(r'[EWI]\d{4} |\{"name": "torchelastic|\*{20}')  # torchrun's own lines
_RANK = re.compile(r"^(?:\s*(?:\[(?:rank|default)?\d+\]:|\d+: ))+")  # torch, --tee and srun write it before each line
_ERROR = re.compile(  # Python's last line
    r"(?:[\w.]*(?:Error|Exception|Interrupt)|[\w.]+(?:Exit|Timeout|Failure))(?::|$)"
)
_STEPS_AFTER = 2  # after a fatal error of one rank, the others may finish the steps under way


def last_words(run: Record) -> tuple[str, ...]:
    """The last lines of the log of a job that died by itself."""
    return tuple(map(_short, _first_error(run.log_end))) if died_by_itself(run) else ()


def died_by_itself(run: Record) -> str:
    """A clause with the exit code and the job's own error. Empty if the job succeeded, if torchaos ended the job, or if
    a fault was applied before."""
    if run.stopped or run.exit_code in (0, None) or any(run.of_kind(Kind.APPLYING, Kind.APPLIED)):
        return ""
    codes = {code for attempt in run.history.attempts for code in attempt.exit_codes.values() if code}
    first, own = failed_rank(run), codes - _ASKED
    code = f"exit code {first.exit_code if first else min(own, default=run.exit_code)}"
    code = f"rank {first.rank} failed first: {code}" if first and len(codes) > 1 else code
    ends = last_words_in_words([*map(_short, _first_error(run.log_end))])
    steps = run.history.executions
    when = (
        f"by itself after step {run.history.last_step}, before any fault" if steps else "before its first step was seen"
    )
    return f"the job died {when} ({code}){ends}"


def last_error(run: Record) -> str:
    """The last exception that a failed job wrote to its log, as a clause. Empty if there is no exception. An exception
    that only says that another rank is gone is named only if there is no other."""
    if run.stopped or run.exit_code in (0, None):
        return ""
    errors = [line for line in _kept(_attempts(run.log_end)[-1]) if _ERROR.match(line)]
    own = [line for line in errors if not _is_consequence(line)] or errors
    return f"; the job's last error: {_short(own[-1])}" if own else ""


def said_at_the_end(run: Record, pattern: str) -> str | None:
    """The last line that matches `pattern` in the last part of the log, from the last failure but one on. None if there
    is none."""
    ends = [place for place, line in enumerate(run.log_end) if RANK_FAILED in line]
    before = ends[: -max(1, run.plan.job.nodes)]  # each node reports the failure of an attempt
    since = _kept(run.log_end[before[-1] + 1 if before else 0 :])
    return next((_short(line) for line in reversed(since) if re.search(pattern, line)), None)


def cause_of_end(run: Record, attempt: int) -> str:
    """The name of the known failure with which an attempt ended: the last in its log that the attempt did not survive.
    A failure that only follows from something else counts only if there is no other. Empty if there is none, or if the
    attempt is the job's last and ended with another error."""
    found = [e for e in run.of_kind(Kind.LOG_CAUSE) if e.attempt in (attempt, None) and not survived(run, e)]
    names = [str(event.data["cause"]) for event in found]
    own = [name for name in names if (known := BY_NAME.get(name)) is None or not known.is_consequence]
    name = (own or names or [""])[-1]
    is_last = bool(run.history.attempts) and attempt == run.history.attempts[-1].number
    return "" if is_last and _ends_otherwise(run, name, attempt) else name


def survived(run: Record, cause: Event) -> bool:
    """Whether the job went on with its steps after this line of its log."""
    after = run.history.executions.of_attempt(cause.attempt or 0).after(cause.mono_s)
    return len(set(after.local_step.tolist())) > _STEPS_AFTER


def _ends_otherwise(run: Record, name: str, attempt: int) -> bool:
    """Whether an unknown error follows, in the log, the last line that shows the known failure `name`. Lines that only
    follow from something else are ignored."""
    last = None
    for line in _kept(_attempts(run.log_end)[-1]):
        cause = cause_of(line, attempt)
        if cause is None and _ERROR.match(line):
            last = line
        elif cause is not None and cause.name == name and not cause.is_consequence:
            last = None
    return last is not None


def _first_error(lines: Sequence[str]) -> list[str]:
    """The last lines of the first attempt that shows an error, because the errors of later attempts may follow from it.
    If no attempt shows an error: the last lines of the last attempt."""
    found = [_own(part) for part in _attempts(lines)]
    return next((words for words in found if words and _ERROR.match(words[-1])), found[-1])


def _attempts(lines: Sequence[str]) -> list[Sequence[str]]:
    """The lines that the ranks wrote before each failure. If torchelastic reports no failure, all lines."""
    ends = [place for place, line in enumerate(lines) if RANK_FAILED in line]
    return [lines[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)] or [lines]


def _own(lines: Sequence[str]) -> list[str]:
    """The last lines up to the last error, without torchrun's own lines and without lines that several ranks repeat. An
    error that only says that another rank is gone counts only if there is no other."""
    kept = _kept(lines)
    errors = [place for place, line in enumerate(kept) if _ERROR.match(line)]
    own = [place for place in errors if not _is_consequence(kept[place])] or errors
    return kept[: own[-1] + 1 if own else len(kept)][-_MOST_LINES:]


def _kept(lines: Sequence[str]) -> list[str]:
    """The lines without torchrun's own lines, and without lines that several ranks repeat."""
    lines = [_RANK.sub("", without_ansi(line)) for line in lines]
    return list(
        dict.fromkeys(line.strip() for line in lines if line.strip() and not _LOGGED.match(line) and line.strip(" ^~"))
    )


def _is_consequence(line: str) -> bool:
    cause = cause_of(line, 0)
    return cause is not None and cause.is_consequence


def _short(line: str) -> str:
    """The line, without its middle if it is too long: the end may be the part of a path that says which checkpoint it
    is. It is cut between words, or between parts of a path."""
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    begin, end = re.match(rf".{{,{half}}}(?=[\s/])", line), re.search(rf"[\s/].{{,{half}}}$", line)
    return f"{begin[0] if begin else line[:half]} ... {end[0].strip() if end else line[-half:]}"


def failed_loads(run: Record, attempt: int) -> list[str]:
    """The paths, in order, of the checkpoints that an attempt tried to load before its first step and in the end could
    not load, although they exist."""
    loads = _before_steps(run, attempt)
    return list(
        dict.fromkeys(checkpoint_of(load.path) for load in loads if is_failed(load, loads) and not load.missing)
    )


def in_words(paths: Sequence[str]) -> str:
    """The names of checkpoints, as a list in a sentence."""
    return enumerated(dict.fromkeys(map(posixpath.basename, paths)))


def not_resumed(run: Record) -> str:
    """A clause about the checkpoints that kept the job from resuming: in each attempt after the job's last step, the
    last load of some rank failed. Empty if an attempt had no such load: then something else kept the job from
    resuming."""
    made = set(run.history.executions.attempt.tolist())
    idle = [one.number for one in run.history.attempts if one.number > max(made, default=-1)]
    if not made or not idle or run.exit_code == 0:
        return ""
    ends = [{load.rank: load for load in _before_steps(run, attempt)}.values() for attempt in idle]
    failed = [[load for load in last if not load.ok] for last in ends]
    if not all(failed):
        return ""
    every = [load for each in failed for load in each]
    bad, missing = (
        list(dict.fromkeys(checkpoint_of(load.path) for load in every if load.missing is gone))
        for gone in (False, True)
    )
    who = f"attempt {idle[0]}" if len(idle) == 1 else f"attempts {idle[0]} to {idle[-1]}"
    clauses = [f"could not load {in_words(bad)}{_found(run, bad[-1])}"] if bad else []
    clauses += [f"looked for {in_words(missing)}, which did not exist"] if missing else []
    return f"{who} {', and '.join(clauses)}"


def _before_steps(run: Record, attempt: int) -> list[Load]:
    first_s = run.history.executions.of_attempt(attempt).first_s()
    return [
        load for load in run.history.loads
        if load.attempt == attempt and load.mono_s <= (inf if first_s is None else first_s)
    ]  # fmt: skip


def _found(run: Record, path: str) -> str:
    """The problem of a checkpoint according to the inventory at the end, in brackets. Empty if none is known."""
    for one in checkpoints_of(run) or ():
        there = posixpath.join(root_of(run), one.path)
        if one.problem and (there == path or is_below(there, path) or is_below(path, there)):
            return f" ({one.problem})"
    return ""
