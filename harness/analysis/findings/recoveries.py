"""How long recoveries and their parts took, and how much work was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.recovery_times import interruptions, invalid_s, never_in_words, recoveries, why_moot
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed, unhit
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Recovery

# bound: (name of the part in a Recovery, words for the end of that part)
PARTS = {
    "felt": ("felt", "the fault was felt"),
    "detect": ("detected", "it was noticed"),
    "torn_down": ("torn_down", "the last rank of the old attempt was gone"),
    "rendezvous": ("rendezvous", "the ranks had found each other again"),
    "workers_up": ("workers_up", "all ranks were up"),
    "restored": ("restored", "the checkpoint was loaded"),
    "first_step": ("first_step", "the first step was done"),
    "catch_up": ("caught_up", "the job had got further than before the fault"),
}


@dataclass(frozen=True)
class Recoveries:
    """The recoveries of a run, within `bounds`: seconds for the parts in PARTS and `invalid_time`, and a number of
    `lost_steps`."""

    bounds: Mapping[str, float]

    def finding(self, run: Record, twins: Sequence[Record]) -> Finding:
        found = recoveries(run, twins)
        if not found:
            return unhit("no fault landed, so there was nothing to recover from")
        if not run.history.executions:
            return inconclusive(f"no step was seen, so nothing shows when the job went on: {why_unseen(run, 'steps')}")
        interrupted = interruptions(run, found)
        whole = all(recovery.parts["caught_up"] is not None for recovery in found)
        invalid = invalid_s(run, interrupted) if whole else None
        worst = {name: _worst([recovery.parts[part] for recovery in found]) for name, (part, _) in PARTS.items()}
        lost = _worst([recovery.lost_steps for recovery in found])
        measured = {**worst, "lost_steps": lost, "invalid_time": invalid, "interruptions": len(interrupted)}
        problem = self._problem(run, twins, found, invalid)
        if problem:
            return replace(problem, measured=measured)
        return passed(self._well(found, measured), **measured)

    def _problem(
        self, run: Record, twins: Sequence[Record], found: Sequence[Recovery], invalid: float | None
    ) -> Finding | None:
        lost_steps, invalid_time = self.bounds.get("lost_steps"), self.bounds.get("invalid_time")
        for recovery in found:
            if recovery.parts["caught_up"] is None:
                return _never(run, twins, recovery)
        unseen = None
        for recovery in found:
            for name, (part, meaning) in PARTS.items():
                bound, took = self.bounds.get(name), recovery.parts[part]
                if bound is not None and took is None:
                    unseen = unseen or inconclusive(f"{recovery.fault}: nothing shows when {meaning}")
                elif bound is not None and took is not None and took > bound:
                    return failed(
                        f"{recovery.fault}: {took:.2f} s until {meaning}, {took - bound:.2f} s more than allowed"
                    )
            if lost_steps is not None and recovery.lost_steps is None:
                unseen = unseen or inconclusive(f"{recovery.fault}: nothing shows where the job resumed")
            elif lost_steps is not None and recovery.lost_steps is not None and recovery.lost_steps > lost_steps:
                return failed(
                    f"{recovery.fault}: {_steps(recovery.lost_steps)} had to be done again, {lost_steps} are allowed"
                )
        if invalid_time is not None and invalid is not None and invalid > invalid_time:
            return failed(
                f"{invalid:.2f} s of training time were invalid, {invalid - invalid_time:.2f} s more than allowed"
            )
        return unseen

    def _well(self, found: Sequence[Recovery], measured: dict[str, float | None]) -> str:
        lost = "an unknown number of steps" if measured["lost_steps"] is None else _steps(int(measured["lost_steps"]))
        slowest = "" if len(found) == 1 else f" at the slowest of {len(found)} recoveries"
        return f"caught up {measured['catch_up'] or 0.0:.2f} s after the fault{slowest}, with {lost} done again"


def _never(run: Record, twins: Sequence[Record], recovery: Recovery) -> Finding:
    if run.ended_on_purpose:
        return inconclusive(
            f"{recovery.fault}: the run was ended on purpose before the job had caught up; see its `until`"
        )
    if run.history.unplaced:
        return inconclusive(f"{recovery.fault}: {why_unplaced(run, run.history.unplaced)}")
    if why := why_moot(run, recovery.fault, twins):
        return inconclusive(f"{recovery.fault}: {why}")
    back = "it came back, and it " if recovery.parts["first_step"] is not None else "it did not come back: it "
    return failed(
        f"{recovery.fault}: the job never caught up: {back}{never_in_words(run, recovery.fault, twins)}",
        First(What.ENDING, run.history.highest_step() or 0),
    )


def _worst(values: Sequence[float | int | None]) -> float | None:
    return None if None in values else max((value for value in values if value is not None), default=None)


def _steps(number: int) -> str:
    return f"{number} {'step' if number == 1 else 'steps'}"
