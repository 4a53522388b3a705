"""The distributions of the values that were measured in the repetitions of one scenario. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from torchaos.harness.record.result import Result


@dataclass(frozen=True)
class Distribution:
    """The distribution of one figure over the repetitions that passed or failed."""

    name: str  # "caught up", "kill-2: caught up", "checkpoint_overhead: blocked"
    seconds: bool
    count: int  # repetitions in which it was seen
    unseen: int  # repetitions in which it was not seen, such as a part of a recovery that never came
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
    """The 90th percentile by nearest rank: the smallest measured value that is not below 90 % of the values."""
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
    """Whether a value of an assertion is already among the recovery's values, as those of recovery_time are."""
    fractions = any(value is not None and not float(value).is_integer() for value in values)
    return name.partition(": ")[2] in found or (fractions and values in known)
