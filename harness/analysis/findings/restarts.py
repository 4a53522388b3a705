"""The restarts of a job, and whether it gave up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torchaos.harness.analysis.ending import cause_of_end, teardown_aborts
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.interfaces import Finding, failed, passed
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.record import Record

Who = Literal["torchelastic", "resubmission", "command"]
_BY = {"torchelastic": "torchelastic", "resubmission": "resubmission", "command": "another torchrun of its command"}


@dataclass(frozen=True)
class Restart:
    who: Who
    attempt: int  # the attempt that began with it
    why: str


def gave_up(run: Record, within_s: float) -> Finding:
    """Whether the job ended with an error, at most `within_s` seconds after the first fault."""
    starts = [event.mono_s for event in run.of_kind(Kind.JOB_STARTED)]
    landed = landings(run)
    since = landed[0].at_s if landed else min(starts, default=0.0)
    last, stopped = run.exited, run.stopped
    if not last or last.mono_s < max(starts, default=0.0) or (stopped and stopped.mono_s <= last.mono_s):
        return failed(f"the job never gave up: it was in attempt {run.history.attempts[-1].number} when it was stopped")
    took = last.mono_s - since
    if run.exit_code == 0:
        return failed("the job ended with exit code 0: it did not report that it had failed", gave_up_s=took)
    if took > within_s:
        return failed(f"the job gave up after {took:.1f} s, {took - within_s:.1f} s too late", gave_up_s=took)
    return passed(f"the job gave up after {took:.1f} s with exit code {run.exit_code}", gave_up_s=took)


def restarts_of(run: Record, last_step: int | None) -> tuple[list[Restart], int]:
    """The restarts of the job, and the number of restarts after the job was done."""
    done = {abort.attempt for abort in teardown_aborts(run, last_step)}
    pairs = list(pairwise(run.history.attempts))
    begun = {event.attempt for event in run.of_kind(Kind.TORCHRUN) if not event.data["ended"]}
    found = []
    for old, new in pairs:
        if old.number not in done:
            within: Who = "command" if new.number in begun else "torchelastic"
            who = within if old.submission == new.submission else "resubmission"
            found.append(Restart(who, new.number, _why(run, old)))
    return found, len(pairs) - len(found)


def _why(run: Record, old: Attempt) -> str:
    """The cause of a restart: the first rank that ended by itself, and the cause that the log names."""
    ended = [
        (process.exited_s or 0.0, rank) for rank, process in old.ranks.items() if process.exit_code not in (None, 0)
    ]
    cause = cause_of_end(run, old.number)
    known = f" ({cause})" if cause else ""
    if not ended:
        return f"nothing shows why attempt {old.number} ended{known}"
    rank = min(ended)[1]
    code = old.exit_codes[rank] or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how} in attempt {old.number}{known}"


def restarts_in_words(found: Sequence[Restart]) -> str:
    if not found:
        return "the job was not restarted"
    times = "once" if len(found) == 1 else f"{len(found)} times"
    by = " and ".join(sorted({_BY[restart.who] for restart in found}))
    return f"the job was restarted {times}, by {by}: {found[0].why}"
