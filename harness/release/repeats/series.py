"""Assigns the results of runs to the repetitions of several scenarios, also while they run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import ExitCode, Result
from torchaos.harness.release.repeats.asked_repeats import Ask
from torchaos.harness.release.repeats.repeats_verdict import Repeats, State, judge_repeats


@dataclass(frozen=True)
class _One:
    first: int  # its place among all runs
    plans: tuple[Plan, ...]
    ask: Ask
    run_dirs: tuple[str, ...]

    @property
    def alike(self) -> bool:
        return len({replace(plan, seed=0).to_json() for plan in self.plans}) == 1

    def of(self, results: Sequence[Result]) -> Sequence[Result]:
        return results[self.first : self.first + len(self.plans)]


class Series:
    """The repetitions of all scenarios. `runs`: file, plan, criterion and run directory, in order. The runs of one file
    are adjacent."""

    def __init__(self, runs: Sequence[tuple[Path, Plan, Ask, Path]]) -> None:
        self._all: list[_One] = []
        self._runs = len(runs)
        first = 0
        for (_, _), group in groupby(runs, key=lambda one: (one[0], id(one[2]))):
            own = list(group)
            plans, dirs = tuple(one[1] for one in own), tuple(str(one[3]) for one in own)
            self._all.append(_One(first, plans, own[0][2], dirs))
            first += len(own)

    def judged(self, results: Sequence[Result], ended: bool = False) -> list[Repeats]:
        """The judgement of each repeated scenario. `results`: the results so far, in the order of the runs. `ended`:
        whether no more results will follow."""
        return [self._judged(one, one.of(results), ended) for one in self._all if one.ask.times > 1]

    def codes(self, results: Sequence[Result], repeats: Sequence[Repeats]) -> list[ExitCode]:
        """The exit codes that count: one for each scenario that is judged by its rate, and one for each other run. The
        caller returns the worst."""
        found, judged = [], iter(repeats)
        for one in self._all:
            together = next(judged) if one.ask.times > 1 else None
            if together is not None and one.ask.of_rate:
                found.append(ExitCode(together.exit_code))
            else:
                found += [ExitCode(result.exit_code) for result in one.of(results)]
        return [*found, ExitCode.INCONCLUSIVE] if len(results) < self._runs else found

    @staticmethod
    def _judged(one: _One, results: Sequence[Result], ended: bool) -> Repeats:
        whole = len(results) == len(one.plans)
        state: State = "done" if whole else "halted" if ended else "running"
        plan = one.plans[0]
        return judge_repeats(plan.scenario, plan.description, results, one.ask, state, one.alike, one.run_dirs)
