"""How long did the recovery from each fault and its parts take, and how much work was lost?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Outcome, Record, Seconds
from torchaos.plugin.analysis import Recoveries, each_hit, longest_stall


@dataclass(frozen=True)
class RecoveryTime(Assertion):
    """Bounds in seconds from the moment when the fault was applied. Without any bound, the job only has to catch up.
    `felt`: the fault took effect; `detect`: it was noticed; `torn_down`: the last rank of the old attempt was gone;
    `rendezvous`: the ranks had found each other again; `workers_up`: all ranks were up; `restored`: the checkpoint was
    loaded; `first_step`: the first step was done; `catch_up`: the job had got further than before the fault.
    `lost_steps`: the largest number of steps that may be done again. `invalid_time`: the time in which the job was
    recovering, plus all other time in which training stood still to write checkpoints (Baidu's invalid training time).
    Recoveries that overlap are one interruption, and their time counts once. `stall`: the longest time, from the first
    fault on, in which no rank completed a step; in a job of replicas, no rank of any replica."""

    name = "recovery_time"
    harm = Harm.SLOW
    needs = frozenset({Need.STEPS, Need.CHECKPOINTS})
    catch_up: Seconds | None = None
    felt: Seconds | None = None
    detect: Seconds | None = None
    torn_down: Seconds | None = None
    rendezvous: Seconds | None = None
    workers_up: Seconds | None = None
    restored: Seconds | None = None
    first_step: Seconds | None = None
    lost_steps: int | None = None
    invalid_time: Seconds | None = None
    stall: Seconds | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        bounds = {name: bound for name, bound in vars(self).items() if bound is not None}
        return self._stalled(run, replace(Recoveries(bounds).finding(run, twins), bound=bounds))

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Judges each replica that was hit; `stall` is that of the whole job."""
        return self._stalled(run, each_hit(replace(self, stall=None), run, twins))

    def _stalled(self, run: Record, found: Finding) -> Finding:
        if self.stall is None:
            return found
        longest = longest_stall(run)
        found = replace(
            found, measured={**found.measured, "stall": longest}, bound={**found.bound, "stall": self.stall}
        )
        if found.outcome is Outcome.FAILED or longest is None:
            return found
        if longest > self.stall:
            words = f"no step was completed for {longest:.2f} s, {longest - self.stall:.2f} s more than allowed"
            return replace(found, outcome=Outcome.FAILED, reason=words)
        return replace(found, reason=f"{found.reason}; no stall was longer than {longest:.2f} s")
