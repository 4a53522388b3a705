"""How much slower than its twin a job was while faults were on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unseen
from torchaos.harness.analysis.recovery_times import on_until_s
from torchaos.harness.interfaces import Finding, failed, inconclusive, passed, unhit
from torchaos.harness.record.history import History
from torchaos.harness.record.record import Record

_CALM = 5  # so many steps before the fault are needed to compare the speed of run and twin
Times = Mapping[tuple[int, int], float]  # seconds that a step took, by (global step, rank)


@dataclass(frozen=True)
class Slowness:
    """Compares the step times of a run with the twins', while faults were on. `ratio`: so many times as long as the
    twin's they may be, on average."""

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
        usual = {key: median(found) for key in own if (found := [times[key] for times in calm if key in times])}
        shared, first = slow & usual.keys(), min(a for a, _ in spans)
        if not shared:
            return inconclusive("no step that was done while the fault was on has a counterpart in the twin")
        before = {key for key in usual if ends[key] <= first}
        doubt = self._doubt(own, usual, before, len({step for step, _ in shared}))
        if doubt:
            return inconclusive(doubt)
        return self._compare(own, usual, shared, before)

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
                f"fewer than {_CALM} steps lie before the fault, so it is not known whether run and twin were equally "
                "fast"
            )
        already = _ratio(own, usual, before)
        if not 1 / self.ratio <= already <= self.ratio:
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
            f"{worst_before:.2f} times: how much of this was the fault's is not known",
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


def _ends(history: History) -> Iterator[tuple[tuple[int, int], float, int]]:
    """The step and rank, the end and the attempt of each step of the final history."""
    steps = history.by_step().executions
    keys = zip(steps.global_step.tolist(), steps.rank.tolist(), strict=True)
    return zip(keys, steps.mono_s.tolist(), steps.attempt.tolist(), strict=True)


def _ratio(own: Times, usual: Times, keys: set[tuple[int, int]]) -> float:
    return _mean(own, keys) / _mean(usual, keys)


def _slowest(own: Times, usual: Times, before: set[tuple[int, int]], length: int) -> float:
    """The largest ratio of own to usual times, over as many steps in a row as the fault lasted, or as there are before
    the fault if these are fewer."""
    steps = sorted({step for step, _ in before})
    size = min(length, len(steps))
    windows = (set(steps[first : first + size]) for first in range(len(steps) - size + 1))
    return max(_ratio(own, usual, {key for key in before if key[0] in window}) for window in windows)


def _mean(times: Times, keys: set[tuple[int, int]]) -> float:
    return sum(times[key] for key in keys) / len(keys)


def _spans(run: Record) -> list[tuple[float, float]]:
    """The times (CLOCK_MONOTONIC) from each landing of a fault until it was over."""
    return [(landing.at_s, on_until_s(run, landing)) for landing in landings(run)]
