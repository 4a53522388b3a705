"""How long did the recovery from each fault and its parts take, and how much work was lost?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Record, Seconds
from torchaos.plugin.analysis import Recoveries, each_hit


@dataclass(frozen=True)
class RecoveryTime(Assertion):
    """Bounds in seconds from the moment when the fault was applied. Without any bound, the job only has to catch up.
    `felt`: the fault took effect; `detect`: it was noticed; `torn_down`: the last rank of the old attempt was gone;
    `rendezvous`: the ranks had found each other again; `workers_up`: all ranks were up; `restored`: the checkpoint was
    loaded; `first_step`: the first step was done; `catch_up`: the job had got further than before the fault.
    `lost_steps`: the largest number of steps that may be done again. `invalid_time`: the time in which the job was
    recovering, plus all other time in which training stood still to write checkpoints (Baidu's invalid training time).
    Recoveries that overlap are one interruption, and their time counts once."""

    name = "recovery_time"
    harm = Harm.SLOW
    needs = frozenset({Need.STEPS, Need.CHECKPOINTS})
    judge_replicas = each_hit

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

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        bounds = {name: bound for name, bound in vars(self).items() if bound is not None}
        return replace(Recoveries(bounds).finding(run, twins), bound=bounds)
