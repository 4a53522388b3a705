"""How long recoveries took, how much work was lost, and how much slower than its twin a job was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.recovery_times import (
    interruptions,
    invalid_s,
    never_in_words,
    on_until_s,
    recoveries,
    why_moot,
)
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed, unhit
from torchaos.harness.record.history import History
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
    """Judges the recoveries of a run. `bounds`: the limits, by name: seconds for the names in PARTS and for
    `invalid_time`, a number for `lost_steps`."""

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
        slowest, most = ("", "") if len(found) == 1 else (f" at the slowest of {len(found)} recoveries", " at most")
        return f"caught up {measured['catch_up'] or 0.0:.2f} s after the fault{slowest}, with {lost} done again{most}"


def longest_stall(run: Record) -> float | None:
    """The longest time in seconds, from the first fault on, in which no rank completed a step: of any replica, if there
    are several. None if no step was completed after the fault."""
    landed = landings(run)
    times = run.steps_made.mono_s
    later = np.sort(times[times > landed[0].at_s]) if landed else times[:0]
    return float(np.diff(later, prepend=landed[0].at_s).max()) if len(later) else None


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


_CALM = 5  # the fewest steps before the fault that are needed to compare the speed of run and twin
Times = Mapping[tuple[int, int], float]  # seconds that a step took, by (global step, rank)


@dataclass(frozen=True)
class Slowness:
    """Compares the step times of a run with the twins', while faults were on. `ratio`: a step may on average take this
    many times as long as the twin's. Steps in which a checkpoint was saved are left out: the first save of a job may
    take longer than all steps before it, and differs from run to run."""

    ratio: float

    def finding(self, run: Record, twins: Sequence[Record]) -> Finding:
        if not twins:
            return inconclusive("there is no twin to compare step times with")
        own, calm = step_times(run.history), [step_times(twin.history) for twin in twins]
        if not own:
            return inconclusive(f"no step times are known: {why_unseen(run, 'steps')}")
        spans = _spans(run)
        if not spans:
            return unhit("no fault landed, so there was nothing to tolerate")
        ends = {key: over_s for key, over_s, _attempt in _ends(run.history)}
        slow = {key for key in own if any(a < ends[key] and ends[key] - own[key] < b for a, b in spans)}
        usual: Times = {key: median(found) for key in own if (found := [times[key] for times in calm if key in times])}
        usual, left_out = _without_saves(usual, slow, (run, *twins))
        shared, first = slow & usual.keys(), min(a for a, _ in spans)
        if not shared:
            return inconclusive("no step that was done while the fault was on has a counterpart in the twin")
        before = {key for key in usual if ends[key] <= first}
        doubt = self._doubt(own, usual, before, len({step for step, _ in shared}))
        if doubt:
            return inconclusive(doubt)
        told = self._compare(own, usual, shared, before)
        if not left_out:
            return told
        without = f" Left out: {_steps(left_out)} in which a checkpoint was saved."
        return replace(told, reason=told.reason + without, measured={**told.measured, "left_out": left_out})

    def _doubt(self, own: Times, usual: Times, before: set[tuple[int, int]], length: int) -> str | None:
        """Why the step times can't be compared. None if they can."""
        steps = sorted({step for step, _ in usual})
        means = {step: _mean(usual, {key for key in usual if key[0] == step}) for step in steps}
        windows = [sum(means[s] for s in steps[n : n + length]) / length for n in range(len(steps) - length + 1)]
        if windows and max(windows) > self.ratio * median(means.values()):
            worst = max(windows) / median(means.values())
            return f"the twin's own steps vary by a factor of {worst:.2f}, so this bound decides nothing"
        if len({step for step, _ in before}) < _CALM:
            return (
                f"fewer than {_CALM} steps that can be compared lie before the fault, so it is not known whether run "
                "and twin were equally fast"
            )
        already = _ratio(own, usual, before)
        if already > self.ratio:  # a run that was faster must keep the bound by its own pace, too
            return f"before the fault the run already took {already:.2f} times as long as the twin: another load was on"
        return None

    def _compare(self, own: Times, usual: Times, shared: set[tuple[int, int]], before: set[tuple[int, int]]) -> Finding:
        ratio, steps = _ratio(own, usual, shared), len({step for step, _ in shared})
        slow = sorted({step for step, rank in shared if own[step, rank] > self.ratio * usual[step, rank]})
        worst = max(shared, key=lambda key: own[key] / usual[key])
        measured = {
            "ratio": round(ratio, 3), "steps": steps, "slow_steps": slow,
            "worst_step": worst[0], "worst_rank": worst[1], "worst_ratio": round(own[worst] / usual[worst], 2),
        }  # fmt: skip
        what = (
            f"while the fault was on, a step took {ratio:.2f} times as long as in the twin; the worst was step "
            f"{worst[0]} on rank {worst[1]}, with {own[worst]:.3f} s instead of {usual[worst]:.3f} s"
        )
        already, worst_before = _ratio(own, usual, before), _slowest(own, usual, before, steps)
        measured["before"] = [round(already, 3), round(worst_before, 3)]
        if ratio / min(1.0, already) <= self.ratio:
            return passed(f"{what}.", **measured)
        if ratio / max(1.0, worst_before) > self.ratio:
            return failed(f"{what}; {self.ratio:g} times are allowed.", **measured)
        return inconclusive(
            f"{what}. But before the fault, steps already took {already:.2f} times as long as in the twin, and up to "
            f"{worst_before:.2f} times: how much of this was the fault's is not known.",
            **measured,
        )  # fmt: skip


def step_times(history: History) -> Times:
    """The seconds that each step of the final history took, by step and rank. The first step of an attempt has no known
    time, and is left out."""
    found = {key: (over_s, attempt) for key, over_s, attempt in _ends(history)}
    return {
        (step, rank): over_s - last[0]
        for (step, rank), (over_s, attempt) in found.items()
        if (last := found.get((step - 1, rank))) is not None and last[1] == attempt and over_s > last[0]
    }


def _without_saves(usual: Times, slow: set[tuple[int, int]], records: Sequence[Record]) -> tuple[Times, int]:
    """The times of the steps in which nobody began a save, and how many slow steps are left out. All times if no slow
    step would be left: a job may save in each step."""
    saves = [save for record in records for save in record.history.saves]
    done = {save.global_step if save.begun_step is None else save.begun_step for save in saves}
    rest = {(step, rank): usual[step, rank] for step, rank in usual if step - 1 not in done}
    if not slow & rest.keys():
        return usual, 0
    return rest, len({step for step, _ in slow & usual.keys()} - {step for step, _ in rest})


def _ends(history: History) -> Iterator[tuple[tuple[int, int], float, int]]:
    """The step and rank, the end and the attempt of each step of the final history."""
    steps = history.by_step().executions
    keys = zip(steps.global_step.tolist(), steps.rank.tolist(), strict=True)
    return zip(keys, steps.mono_s.tolist(), steps.attempt.tolist(), strict=True)


def _ratio(own: Times, usual: Times, keys: set[tuple[int, int]]) -> float:
    return _mean(own, keys) / _mean(usual, keys)


def _slowest(own: Times, usual: Times, before: set[tuple[int, int]], length: int) -> float:
    """The largest ratio of the run's times to the usual times, over as many steps in a row as the fault lasted, or as
    there are before the fault if these are fewer."""
    steps = sorted({step for step, _ in before})
    size = min(length, len(steps))
    windows = (set(steps[first : first + size]) for first in range(len(steps) - size + 1))
    return max(_ratio(own, usual, {key for key in before if key[0] in window}) for window in windows)


def _mean(times: Times, keys: set[tuple[int, int]]) -> float:
    return sum(times[key] for key in keys) / len(keys)


def _spans(run: Record) -> list[tuple[float, float]]:
    """The times (CLOCK_MONOTONIC) from each landing of a fault until it was over."""
    return [(landing.at_s, on_until_s(run, landing)) for landing in landings(run)]
