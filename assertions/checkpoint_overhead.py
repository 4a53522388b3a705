"""What do checkpoints cost: how long, and for what share of the time, does training stand still for them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torchaos.plugin import Assertion, Finding, Harm, History, Need, Record, Seconds, failed, inconclusive, passed
from torchaos.plugin.analysis import Save, standstill


@dataclass(frozen=True)
class CheckpointOverhead(Assertion):
    """Checkpoints cost no more time than these bounds. `blocked`: the longest time (seconds) that training stands still
    for one checkpoint. `blocked_share`: the share (0 to 1) of the training time in which training stands still for
    checkpoints. `writing_share`: the share of the training time in which a checkpoint is being written, also in the
    background."""

    name = "checkpoint_overhead"
    harm = Harm.SLOW
    needs = frozenset({Need.STEPS, Need.CHECKPOINTS})

    blocked: Seconds | None = None
    blocked_share: float | None = None
    writing_share: float | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        bounds = {item.name: bound for item in fields(self) if (bound := getattr(self, item.name)) is not None}
        return replace(self._judge(run, bounds), bound=bounds)

    def _judge(self, run: Record, bounds: dict[str, float]) -> Finding:
        saves = [save for save in run.history.saves if save.ended_s is not None]
        if not saves:
            return inconclusive("no checkpoint was seen while it was written, so its cost is not known")
        training = training_s(run.history)
        if training <= 0.0:
            return inconclusive("too few steps were seen to know how long the job trained")
        stood = standstill(run.history)
        blocked, possible = list(stood.blocked.values()), stood.possible.values()
        measured = {
            "checkpoints": len(blocked), "blocked": max(blocked), "blocked_share": sum(blocked) / training,
            "writing_share": writing_s(saves) / training, "training_s": training,
        }  # fmt: skip
        for name, bound in bounds.items():
            if measured[name] > bound:
                return replace(failed(_WORDS[name].format(measured[name], bound)), measured=measured)
        unsure = {"blocked": max(possible), "blocked_share": sum(possible) / training}
        for name, most in unsure.items():
            if most > bounds.get(name, most):
                return inconclusive(
                    f"{_WORDS[name].format(most, bounds[name])}, if the ranks that made no step while a checkpoint was "
                    f"written waited for it; the calls that save took {measured[name]:.3g}",
                    **measured,
                )
        stood_still = f"training stood still for at most {max(blocked):.3g} s per checkpoint"
        share = f"{sum(blocked) / training:.2%} of the time"
        return passed(f"{stood_still}, {share}; {len(blocked)} were written", **measured)


_WORDS = {
    "blocked": "training stood still for {:.3g} s for one checkpoint, {:.3g} s are allowed",
    "blocked_share": "training stood still for checkpoints for {:.2%} of the time, {:.2%} are allowed",
    "writing_share": "checkpoints were being written for {:.2%} of the time, {:.2%} are allowed",
}


def training_s(history: History) -> float:
    """The training time in seconds: over all attempts, the time from the end of the first step to the end of the last
    step."""
    times = (history.executions.of_attempt(number) for number in history.executions.attempts)
    return sum((own.last_s() or 0.0) - (own.first_s() or 0.0) for own in times)


def writing_s(saves: Sequence[Save]) -> float:
    """The time in seconds in which at least one checkpoint was being written."""
    total, until = 0.0, float("-inf")
    for begun, ended in sorted((save.begun_s, save.ended_s or save.begun_s) for save in saves):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return total
