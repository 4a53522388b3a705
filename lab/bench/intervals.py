"""Statistics that the benchmarks share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t, 97.5 %, by degrees of freedom (NIST/SEMATECH e-Handbook, table 1.3.6.7.2); beyond 30 it is nearly normal.
T = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086,
    21: 2.080, 22: 2.074, 23: 2.069, 24: 2.064, 25: 2.060, 26: 2.056, 27: 2.052, 28: 2.048, 29: 2.045, 30: 2.042,
}  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and the ends of its 95 % interval. Needs two values at least."""
    mean = statistics.fmean(values)
    half = T.get(len(values) - 1, 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank: the smallest value that at least `percent` percent of the values do not
    exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the ends of its 95 % interval, whatever the distribution: order statistics, by the binomial
    distribution (Conover, Practical Nonparametric Statistics, 3.2). Needs six values at least."""
    ordered, count = sorted(values), len(values)
    below, place = 0.0, 0
    while (below := below + math.comb(count, place) / 2**count) <= 0.025:
        place += 1
    if not place:
        raise ValueError(f"{count} values give no 95 % interval of a median")
    return statistics.median(ordered), ordered[place - 1], ordered[count - place]
