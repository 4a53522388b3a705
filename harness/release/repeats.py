"""Repetitions of a scenario: how often it is repeated, how many must pass, the distributions of the measured values,
and one verdict on all of them. A repetition passes if its run is *passed*. An inconclusive repetition proves nothing:
it counts neither as passed nor as failed.

The confidence bounds of a rate are exact (Clopper and Pearson, Biometrika 26, 1934). SciPy computes them; it is in the
extra `statistics`. Each bound is one-sided: with the given confidence, the true rate is above `lower`, or below
`upper`. For 0 failures in 200 trials, the upper bound at 0.95 is 0.0149."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Literal

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict, worst
from torchaos.harness.scenario.grammar import Repeat


def lower(successes: int, trials: int, confidence: float) -> float | None:
    """The lower bound of the rate. None if SciPy is not installed. 0 without any trial."""
    return _bound(successes, trials, confidence, "greater", "low")


def upper(successes: int, trials: int, confidence: float) -> float | None:
    """The upper bound of the rate. None if SciPy is not installed. 1 without any trial."""
    return _bound(successes, trials, confidence, "less", "high")


def needed(rate: float, confidence: float) -> int:
    """The smallest number of repetitions that shows this rate (below 1) if all of them pass. Needs SciPy."""
    enough = 1
    while not _shows(enough, rate, confidence):
        enough *= 2
    return bisect_left(range(enough), True, lo=enough // 2, key=lambda trials: _shows(trials, rate, confidence))


def _shows(trials: int, rate: float, confidence: float) -> bool:
    return (lower(trials, trials, confidence) or 0.0) >= rate


def _bound(successes: int, trials: int, confidence: float, side: str, end: str) -> float | None:
    if not trials:
        return 0.0 if end == "low" else 1.0
    stats = _scipy()
    if stats is None:
        return None
    interval = stats.binomtest(successes, trials, alternative=side).proportion_ci(confidence, method="exact")
    return float(getattr(interval, end))


def _scipy() -> Any:
    try:
        return import_module("scipy.stats")
    except ImportError:
        return None


CONFIDENCE = 0.95
MISSING = "install SciPy (pip install 'torchaos[statistics]')"


@dataclass(frozen=True)
class Ask:
    """How often a scenario is repeated, and how many repetitions must pass. With neither `at_least` nor `rate`, each
    repetition is judged alone, and the worst verdict counts."""

    times: int = 1
    at_least: int | None = None  # the number that must pass
    rate: float | None = None  # the share that must pass; it must be shown with `confidence`
    confidence: float = CONFIDENCE

    @property
    def of_rate(self) -> bool:
        """Whether the repetitions are judged together, so that a single failed repetition does not fail the
        scenario."""
        return self.at_least is not None or self.rate is not None

    @property
    def in_words(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least} of {self.times} must pass"
        if self.rate is not None:
            return f"with {self.confidence:g} confidence, a share of at least {self.rate:g} must pass"
        return "all must pass"


def ask_of(
    written: Repeat | None, times: int | None = None, at_least: int | None = None, rate: float | None = None,
    confidence: float | None = None,
) -> Ask:  # fmt: skip
    """Combines the scenario's `repeat` with the options of the command line, which win: `times` replaces all of
    `repeat`; `at_least` or `rate` replaces its criterion. Raises UsageError if the criterion can't be met or
    contradicts itself."""
    base = Ask() if written is None else Ask(written.times, written.at_least, written.rate, written.confidence)
    base = base if times is None else Ask(times)
    if at_least is not None or rate is not None:
        base = Ask(base.times, at_least, rate, base.confidence)
    return _checked(base if confidence is None else Ask(base.times, base.at_least, base.rate, confidence))


def _checked(ask: Ask) -> Ask:
    if ask.at_least is not None and ask.rate is not None:
        raise UsageError("write either at_least or rate")
    if ask.of_rate and ask.times < 2:
        raise UsageError("a rate is judged over several repetitions; give their number, such as --repeat 30")
    if ask.at_least is not None and ask.at_least > ask.times:
        raise UsageError(
            f"at least {ask.at_least} of {ask.times} can never pass; ask for fewer, or repeat it more often"
        )
    if ask.rate is not None:
        best = lower(ask.times, ask.times, ask.confidence)
        if best is None:
            raise UsageError(f"a rate is shown by a confidence bound: {MISSING}, or ask for a number with `at_least`")
        if best < ask.rate:
            raise UsageError(
                f"{ask.times} repetitions can't show a rate of {ask.rate:g} with {ask.confidence:g} confidence, even "
                f"if all pass ({best:.3f}); {needed(ask.rate, ask.confidence)} are needed"
            )
    return ask


@dataclass(frozen=True)
class Distribution:
    """The distribution of a figure over the repetitions that passed or failed."""

    name: str  # "caught up", "kill-2: caught up", "checkpoint_overhead: blocked"
    seconds: bool
    count: int  # repetitions in which it was seen
    unseen: int  # repetitions in which it was not seen, such as a part of a recovery that was never reached
    min: float | None
    median: float | None
    p90: float | None  # the 90th percentile
    max: float | None

    @classmethod
    def of(cls, name: str, values: Sequence[float | None], seconds: bool) -> Distribution:
        seen = [float(value) for value in values if value is not None and math.isfinite(value)]
        if not seen:
            return cls(name, seconds, 0, len(values), None, None, None, None)
        unseen = len(values) - len(seen)
        return cls(name, seconds, len(seen), unseen, min(seen), median(seen), p90(seen), max(seen))


def p90(values: Sequence[float]) -> float:
    """The 90th percentile by nearest rank: the smallest of the values such that 90 % of all values are not larger."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


Series = dict[str, list[float | None]]


def distributions(results: Sequence[Result]) -> tuple[Distribution, ...]:
    """The distributions of all measured values: each part of each recovery, the lost steps, the duration of the run,
    and all further numbers that assertions measured."""
    told = [dict(_figures(result)) for result in results]
    names = list(dict.fromkeys(name for one in told for name in one))
    found: dict[str, Distribution] = {}
    known: list[list[float | None]] = []
    for name in names:
        values = [one[name][0] if name in one else None for one in told]
        seconds = any(one[name][1] for one in told if name in one)
        if ": " in name and _is_repeated(name, values, known, found):
            continue
        known.append(values)
        found[name] = Distribution.of(name, values, seconds)
    return tuple(found.values())


def _figures(result: Result) -> Iterator[tuple[str, tuple[float | None, bool]]]:
    """Yields (name, (value, whether it is a duration))."""
    several, seen = len(result.recoveries) > 1, Counter[str]()
    for recovery in result.recoveries:
        seen[recovery.fault] += 1
        again = f" ({seen[recovery.fault]})" if seen[recovery.fault] > 1 else ""
        whose = f"{recovery.fault}{again}, " if several else ""
        for part, at in recovery.parts.items():
            yield f"{whose}{part}", (at, True)
        yield f"{whose}lost_steps", (recovery.lost_steps, False)
    yield "run", (result.duration_s, True)
    yield "attempts", (result.attempts, False)
    for case in result.cases:
        for name, value in case.measured.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{case.name}: {name}", (float(value), name in case.seconds or name.endswith("_s"))


def _is_repeated(
    name: str, values: list[float | None], known: Sequence[list[float | None]], found: dict[str, Distribution]
) -> bool:
    """Whether the table of recoveries already has this measured value of an assertion: a figure with the same name, or
    one with the same numbers, if some of these are fractions."""
    fractions = any(value is not None and not float(value).is_integer() for value in values)
    return name.partition(": ")[2] in found or (fractions and values in known)


State = Literal["running", "halted", "done"]
_ERRORS = (ExitCode.USAGE, ExitCode.ROLLBACK, ExitCode.INTERNAL)


@dataclass(frozen=True)
class Rate:
    """The rate of the whole scenario, or of one of its cases. Each bound is one-sided, with the requested confidence;
    None if SciPy is not installed."""

    name: str  # "scenario", or the case's
    passed: int
    failed: int
    inconclusive: int  # or an error
    low: float | None
    high: float | None

    @classmethod
    def of(cls, name: str, verdicts: Sequence[Verdict], confidence: float) -> Rate:
        counts = Counter(verdicts)
        good, bad = counts[Verdict.PASSED], counts[Verdict.FAILED]
        rest, trials = len(verdicts) - good - bad, len(verdicts)
        return cls(name, good, bad, rest, lower(good, trials, confidence), upper(good + rest, trials, confidence))


@dataclass(frozen=True)
class Repeats:
    scenario: str
    description: str
    asked: str
    times: int  # the number of repetitions that were requested
    seeds: tuple[int, ...]  # the seeds of the repetitions that ended
    verdict: Verdict
    exit_code: int
    reason: str
    confidence: float
    rate: Rate
    cases: tuple[Rate, ...]
    figures: tuple[Distribution, ...]
    notes: tuple[str, ...]
    of_rate: bool  # whether they are judged together
    run_dirs: tuple[str, ...] = ()  # of all repetitions, also of those that never began


def judge_repeats(
    scenario: str, description: str, results: Sequence[Result], ask: Ask, state: State, alike: bool = False,
    run_dirs: Sequence[str] = (),
) -> Repeats:  # fmt: skip
    """Judges the repetitions of a scenario. `results`: the results of the repetitions that ended, in order. `alike`:
    whether all plans are equal except for the seed."""
    rate = Rate.of("scenario", [result.verdict for result in results], ask.confidence)
    verdict, code, reason = _verdict(results, ask, state, rate)
    names = list(dict.fromkeys(case.name for result in results for case in result.cases))
    of_case = {
        name: [_verdict_of(result, case) for result in results for case in result.cases if case.name == name]
        for name in names
    }
    telling = [result for result in results if result.verdict in (Verdict.PASSED, Verdict.FAILED)]
    return Repeats(
        scenario, description, ask.in_words, ask.times, tuple(result.seed for result in results), verdict, code, reason,
        ask.confidence, rate, tuple(Rate.of(name, of_case[name], ask.confidence) for name in names),
        distributions(telling), tuple(_notes(rate, alike)), ask.of_rate, tuple(run_dirs),
    )  # fmt: skip


def _verdict_of(result: Result, case: Case) -> Verdict:
    """The verdict of an assertion. It is inconclusive if the run proves nothing."""
    telling = result.verdict in (Verdict.PASSED, Verdict.FAILED) or case.kind == "rollback"
    return case.verdict if telling else Verdict.INCONCLUSIVE


def _verdict(results: Sequence[Result], ask: Ask, state: State, rate: Rate) -> tuple[Verdict, ExitCode, str]:
    told = f"{rate.passed} of {len(results)} passed{_rest(rate)}"
    errors = [result for result in results if result.exit_code in _ERRORS]
    if errors:
        code = worst([ExitCode(result.exit_code) for result in errors])
        first = next(result for result in errors if result.exit_code == code)
        return Verdict.ERROR, code, f"{told}; with seed {first.seed}: {first.reason}"
    if state == "running":
        return Verdict.ERROR, ExitCode.INTERNAL, f"not finished: {len(results)} of {ask.times} done, {told}"
    if state == "halted":
        verdict = Verdict.FAILED if rate.failed and not ask.of_rate else Verdict.INCONCLUSIVE
        return verdict, verdict.exit_code, f"halted after {len(results)} of {ask.times}; {told}"
    verdict, why = _judged(ask, rate)
    return verdict, verdict.exit_code, f"{told}; {why}{_wanted(ask, rate)}"


def _judged(ask: Ask, rate: Rate) -> tuple[Verdict, str]:
    if ask.at_least is not None:
        asked = f"at least {ask.at_least} were required"
        if rate.passed >= ask.at_least:
            return Verdict.PASSED, asked
        if rate.passed + rate.inconclusive < ask.at_least:
            return Verdict.FAILED, asked
        return Verdict.INCONCLUSIVE, f"{asked}, and the inconclusive repetitions would decide"
    if ask.rate is not None and rate.low is not None and rate.high is not None:
        if rate.low >= ask.rate:
            return Verdict.PASSED, f"a rate of at least {ask.rate:g} is shown"
        if rate.high < ask.rate:
            return Verdict.FAILED, f"the rate is below {ask.rate:g}"
        return Verdict.INCONCLUSIVE, f"it is not shown whether the rate is at least {ask.rate:g}"
    if rate.failed:
        return Verdict.FAILED, "all must"
    return (Verdict.INCONCLUSIVE if rate.inconclusive else Verdict.PASSED), "all must"


def _wanted(ask: Ask, rate: Rate) -> str:
    if rate.low is None or rate.high is None:
        return f"; for a confidence bound, {MISSING}"
    high = f", and at most {rate.high:.1%}" if rate.high < 1 else ""
    return f"; with {100 * ask.confidence:g} % confidence the true rate is at least {rate.low:.1%}{high}"


def _rest(rate: Rate) -> str:
    parts = [
        f"{count} {word}" for count, word in ((rate.failed, "failed"), (rate.inconclusive, "inconclusive")) if count
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _notes(rate: Rate, alike: bool) -> list[str]:
    if alike and rate.passed and rate.failed:
        return [
            "the plans differ only in the seed, from which nothing is drawn here: so chance decided which runs passed"
        ]
    return []


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


class Repetitions:
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
        """The exit codes that count: one for each scenario that is judged by its rate, one for each other run, and
        INCONCLUSIVE if some runs have no result. `repeats`: what `judged` returned for these results. The caller
        returns the worst code."""
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
