"""How often was the job restarted, by whom and why? And does a job give up if it can't recover?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchaos.plugin import Assertion, Finding, Harm, Record, Seconds, failed, inconclusive, passed
from torchaos.plugin.analysis import (
    Regex,
    Restart,
    each,
    gave_up,
    landings,
    last_step_of,
    no_rank_found,
    restarts_in_words,
    restarts_of,
)


@dataclass(frozen=True)
class Restarts(Assertion):
    """At most `max` restarts (default: one for each fault that landed), at least `min`, all by `who` (`command`: the
    job's command started another torchrun). With `gives_up_within`, the job must end with an error within that many
    seconds after the first fault, and no recovery is expected; `pattern` is then a regular expression for the line at
    the end of its log that says why. A restart is counted separately if the job was done and
    aborted only while it exited."""

    name = "restarts"
    harm = Harm.SLOW
    needs = frozenset()
    judge_replicas = each

    max: int | None = None
    min: int = 0
    who: Literal["torchelastic", "resubmission", "command"] | None = None
    gives_up_within: Seconds | None = None
    pattern: Regex | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None and self.gives_up_within is None:
            raise ValueError("pattern is for the reason of a job that gives up; write gives_up_within, too")

    @property
    def expects_recovery(self) -> bool:
        return self.gives_up_within is None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        if not run.history.attempts:
            return inconclusive("no attempt of the job was seen")
        if self.gives_up_within is None and (unfound := no_rank_found(run)):
            return inconclusive(unfound)
        found, aborted = restarts_of(run, last_step_of(twins))
        finding = (
            self._counted(run, found)
            or (gave_up(run, self.gives_up_within, self.pattern) if self.gives_up_within is not None else None)
            or passed(restarts_in_words(found))
        )
        measured = {"restarts": len(found), "attempts": len(run.history.attempts), "after_the_end": aborted}
        bound = {
            "max": self._most(run),
            "min": self.min or None,
            "who": self.who,
            "gives_up_within": self.gives_up_within,
            "pattern": self.pattern,
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
            return failed(f"{restarts_in_words(found)}; {most} allowed")
        if len(found) < self.min:
            return failed(f"{restarts_in_words(found)}; at least {self.min} expected")
        others = [restart for restart in found if self.who and restart.who != self.who]
        others.sort(key=lambda restart: restart.who is None)
        if not others:
            return None
        other = others[0]
        if other.who or self.who == "resubmission":
            by = f"was started by {other.who}" if other.who else "was started in the same submission"
            return failed(f"attempt {other.attempt} {by}, not by {self.who}: {other.why}")
        return inconclusive(f"nothing shows what started attempt {other.attempt}: no torchrun was seen; {other.why}")
