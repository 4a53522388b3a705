"""Did the job save a checkpoint between the first sign of a failing GPU and the death of a rank?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Kind, Need, Record, failed, inconclusive, passed
from torchaos.plugin.analysis import Landing, is_of_gpu, landings


@dataclass(frozen=True)
class CheckpointTriggered(Assertion):
    """A whole checkpoint was saved because of the fault `sign` (default: the first fault of a GPU's health). Its save
    began after that fault and finished before the first rank ended, and the twin has no checkpoint of the same step."""

    sign: str | None = None

    name = "checkpoint_triggered"
    harm = Harm.REACTION
    needs = frozenset({Need.STEPS, Need.CHECKPOINTS, Need.TWIN})

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        hit = next((landing for landing in landings(run) if self._is_sign(run, landing)), None)
        if hit is None:
            return inconclusive("the GPU's fault was never reported, so no checkpoint was due")
        death_s = _death(run, hit)
        if death_s is None:
            return inconclusive(f"no rank ended after {hit.fault}, so there was no death to save before")
        if not run.history.saves and not any(twin.history.saves for twin in twins):
            return inconclusive("no checkpoint was seen at all, in the run or in the twin")
        between = [save for save in run.history.saves if hit.at_s <= save.begun_s < death_s]
        whole = [save for save in between if save.ok and save.ended_s is not None and save.ended_s <= death_s]
        if not whole:
            begun = f"{len(between)} were begun, and none was whole" if between else "none begun"
            return failed(f"no checkpoint was taken in the {death_s - hit.at_s:.2f} s before the death; {begun}")
        regular = {save.global_step for twin in twins for save in twin.history.saves}
        own = [save for save in whole if save.global_step not in regular]
        if twins and len(whole) > 1 and not own:
            before = f"{death_s - hit.at_s:.2f} s before the death"
            return failed(f"all {len(whole)} checkpoints of the {before} are regular: the twin has them too")
        if twins and not own:
            return inconclusive(
                f"the checkpoint after step {whole[0].global_step} was taken in that time, but the twin has it too: "
                "it may have been due anyway; move the fault to a time between two regular checkpoints"
            )
        chosen = (own or whole)[0]
        took = (chosen.ended_s or chosen.begun_s) - hit.at_s
        unsure = "" if twins else "; without a twin, a regular checkpoint can't be distinguished from a triggered one"
        return (passed if twins else inconclusive)(
            f"a checkpoint after step {chosen.global_step} was whole {took:.2f} s after {hit.fault}, "
            f"{death_s - hit.at_s - took:.2f} s before the death{unsure}",
            seconds=took, step=chosen.global_step,
        )  # fmt: skip

    def _is_sign(self, run: Record, hit: Landing) -> bool:
        if self.sign is not None:
            return hit.fault == self.sign
        return is_of_gpu(run, hit)


def _death(run: Record, hit: Landing) -> float | None:
    """The time (CLOCK_MONOTONIC) at which the first rank ended after the fault, with any exit code but 0. None if no
    rank did."""
    exits = run.of_kind(Kind.RANK_EXITED)
    return min((e.mono_s for e in exits if e.mono_s >= hit.at_s and e.data["exit_code"] != 0), default=None)
