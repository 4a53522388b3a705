"""Exact confidence bounds of a rate, by Clopper and Pearson (Biometrika 26, 1934), computed by SciPy.

SciPy belongs to the extra `statistics`, and is imported only here. Each bound is one-sided: with the given confidence,
the true rate is above `lower`, or below `upper`. For 0 failures in 200 trials, the upper bound at 0.95 is 0.0149."""

from __future__ import annotations

from bisect import bisect_left
from importlib import import_module
from typing import Any


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
