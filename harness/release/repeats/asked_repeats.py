"""How often a scenario is repeated, how many of the repetitions must pass, and exact confidence bounds of a rate."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchaos.harness.interfaces import UsageError
from torchaos.harness.scenario.grammar import Repeat

# Exact confidence bounds of a rate, by Clopper and Pearson (Biometrika 26, 1934), computed by SciPy.
#
# SciPy belongs to the extra `statistics`, and is imported only here. Each bound is one-sided: with the given
# confidence, the true rate is above `lower`, or below `upper`. For 0 failures in 200 trials, the upper bound at 0.95 is
# 0.0149.


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


# How often a scenario is repeated, and how many of the repetitions must pass.

CONFIDENCE = 0.95
MISSING = "install SciPy (pip install 'torchaos[statistics]')"


@dataclass(frozen=True)
class Ask:
    """How often a scenario is repeated, and how many repetitions must pass. With neither `at_least` nor `rate`, each
    repetition is judged alone, and the worst verdict counts."""

    times: int = 1
    at_least: int | None = None  # the number that must pass
    rate: float | None = None  # the share that must pass, which must be shown with `confidence`
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
    """Combines `repeat` of the scenario with the options of the command line, which win. `times` replaces everything in
    the scenario; a criterion replaces the scenario's criterion. Raises UsageError if the criterion can't be met or
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
