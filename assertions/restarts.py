"""How often was the job restarted, by whom and why? And does a job give up if it can't recover?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torchaos.harness.analysis.ending import cause_of_end, final_step, teardown_aborts
from torchaos.plugin import Assertion, Finding, Harm, Kind, Record, Seconds, failed, inconclusive, passed
from torchaos.plugin.analysis import Attempt, each, landings

Who = Literal["torchelastic", "resubmission", "command"]
_BY = {"torchelastic": "torchelastic", "resubmission": "resubmission", "command": "another torchrun of its command"}


@dataclass(frozen=True)
class Restart:
    who: Who
    attempt: int  # the attempt that began with it
    why: str


@dataclass(frozen=True)
class Restarts(Assertion):
    """At most `max` restarts (default: one for each fault that landed), at least `min`, all by `who` (`command`: the
    job's command started another torchrun). With `gives_up_within`, the job must end with an error within that many
    seconds after the first fault, and no recovery is expected. A restart is counted separately if the job was done and
    aborted only while it exited."""

    name = "restarts"
    harm = Harm.SLOW
    needs = frozenset()
    judge_replicas = each

    max: int | None = None
    min: int = 0
    who: Who | None = None
    gives_up_within: Seconds | None = None

    @property
    def expects_recovery(self) -> bool:
        return self.gives_up_within is None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        if not run.history.attempts:
            return inconclusive("no attempt of the job was seen")
        found, aborted = restarts_of(run, final_step(twins[0]) if twins else None)
        finding = self._counted(run, found) or self._gave_up(run) or passed(_words(found))
        measured = {"restarts": len(found), "attempts": len(run.history.attempts), "after_the_end": aborted}
        bound = {
            "max": self._most(run),
            "min": self.min or None,
            "who": self.who,
            "gives_up_within": self.gives_up_within,
        }
        return replace(
            finding,
            measured={**measured, **finding.measured},
            bound={name: value for name, value in bound.items() if value is not None},
        )

    def _most(self, run: Record) -> int | None:
        if self.max is not None or self.gives_up_within is not None:
            return self.max
        return len(landings(run))

    def _counted(self, run: Record, found: Sequence[Restart]) -> Finding | None:
        most = self._most(run)
        if most is not None and len(found) > most:
            return failed(f"{_words(found)}; {most} allowed")
        if len(found) < self.min:
            return failed(f"{_words(found)}; at least {self.min} expected")
        others = [restart for restart in found if self.who and restart.who != self.who]
        if others:
            return failed(
                f"attempt {others[0].attempt} was started by {others[0].who}, not by {self.who}: {others[0].why}"
            )
        return None

    def _gave_up(self, run: Record) -> Finding | None:
        if self.gives_up_within is None:
            return None
        starts = [event.mono_s for event in run.of_kind(Kind.JOB_STARTED)]
        landed = landings(run)
        since = landed[0].at_s if landed else min(starts, default=0.0)
        last, stopped = run.exited, run.stopped
        if not last or last.mono_s < max(starts, default=0.0) or (stopped and stopped.mono_s <= last.mono_s):
            return failed(
                f"the job never gave up: it was in attempt {run.history.attempts[-1].number} when it was stopped"
            )
        took = last.mono_s - since
        if run.exit_code == 0:
            return failed("the job ended with exit code 0: it did not report that it had failed", gave_up_s=took)
        if took > self.gives_up_within:
            return failed(
                f"the job gave up after {took:.1f} s, {took - self.gives_up_within:.1f} s too late", gave_up_s=took
            )
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


def _words(found: Sequence[Restart]) -> str:
    if not found:
        return "the job was not restarted"
    times = "once" if len(found) == 1 else f"{len(found)} times"
    by = " and ".join(sorted({_BY[restart.who] for restart in found}))
    return f"the job was restarted {times}, by {by}: {found[0].why}"
