"""A recovery as a timeline: each part begins where the latest part before it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchaos.harness.telling.terminal.pen import Marks

_RESTART = ("detected", "torn_down", "rendezvous", "workers_up")


@dataclass(frozen=True)
class Span:
    part: str
    begin_s: float  # since the fault
    end_s: float | None  # None: not seen

    @property
    def took_s(self) -> float:
        return 0.0 if self.end_s is None else max(0.0, self.end_s - self.begin_s)


def spans(parts: Mapping[str, float | None]) -> list[Span]:
    """The parts. If the job went on without a restart, parts of a restart that never came are left out."""
    if went_on(parts):
        parts = {part: at for part, at in parts.items() if at is not None}
    found, latest = [], 0.0
    for part, at in parts.items():
        found.append(Span(part, latest, at))
        latest = max(latest, at or 0.0)
    return found


def went_on(parts: Mapping[str, float | None]) -> bool:
    """Whether the job caught up without any sign of a restart."""
    return parts.get("caught_up") is not None and all(parts.get(part) is None for part in _RESTART)


def bar(span: Span, whole_s: float, width: int, marks: Marks) -> str:
    """Draw a span as a bar, to half a character cell if `marks` has half cells. A span that has ended gets at least
    half a cell."""
    if span.end_s is None:
        return ""
    halves = 2 * width
    begin = min(_scaled(span.begin_s, whole_s, halves), halves - 1)
    end = max(begin + 1, _scaled(span.end_s, whole_s, halves))
    cells = [marks.bar] * (-(-end // 2) - begin // 2)
    if end % 2:
        cells[-1] = marks.bar_ends
    if begin % 2:
        cells[0] = marks.bar_starts
    return " " * (begin // 2) + "".join(cells)


def _scaled(at_s: float, whole_s: float, halves: int) -> int:
    return round(min(1.0, at_s / whole_s) * halves) if whole_s > 0 else 0


def seconds(value: float, whole_s: float) -> str:
    """The durations, all with the same sensible number of digits."""
    return f"{value:.{3 if whole_s < 10 else 2 if whole_s < 100 else 1}f} s"
