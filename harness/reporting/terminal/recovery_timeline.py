"""A recovery as a timeline: each part begins when all parts before it have ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchaos.harness.record.plan import seconds_in_words
from torchaos.harness.record.result import Recovery
from torchaos.harness.reporting.terminal.text import Marks

# For each part: what is over at its end, and what its time was spent on.
_WORDS = {
    "felt": ("felt", "until it was felt"), "detected": ("noticed", "noticing it"),
    "torn_down": ("ranks gone", "stopping the ranks"), "rendezvous": ("rendezvous", "rendezvous"),
    "workers_up": ("ranks up", "starting processes"), "imported": ("torch imported", "importing torch"),
    "prepared": ("group begun", "the script before the process group"), "joined": ("group joined", "process group"),
    "set_up": ("load begun", "set-up until the load"), "restored": ("loaded", "loading"),
    "first_step": ("first step", "first step"), "caught_up": ("caught up", "catching up"),
}  # fmt: skip
STRETCHES = {
    "noticing": ("felt", "detected"), "torchelastic": ("torn_down", "rendezvous", "workers_up"),
    "start of the ranks": ("imported", "prepared", "joined", "set_up"), "checkpoint": ("restored",),
    "steps": ("first_step", "caught_up"),
}  # fmt: skip
_WORTH = 0.1  # share of the recovery: a shorter part is not among the longest
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
    """The parts of a recovery as a timeline. If the job continued without a restart, the parts of a restart that never
    came are left out."""
    if went_on(parts):
        parts = {part: at for part, at in parts.items() if at is not None}
    found, latest = [], 0.0
    for part, at in parts.items():
        found.append(Span(part, latest, at))
        latest = max(latest, at or 0.0)
    return found


def over_in_words(part: str) -> str:
    """What has happened at the end of the part, in a word or two."""
    return _WORDS[part][0] if part in _WORDS else part.replace("_", " ")


def spent_in_words(part: str) -> str:
    """What the job did during the part, such as `start of the ranks`."""
    return _WORDS[part][1] if part in _WORDS else part.replace("_", " ")


def longest(parts: Mapping[str, float | None], most: int = 3) -> list[Span]:
    """The parts that took most of the time, the longest first. Empty if there is only one part."""
    found = [span for span in spans(parts) if span.end_s is not None]
    whole_s = max((span.end_s or 0.0 for span in found), default=0.0)
    worth = [span for span in found if span.took_s >= _WORTH * whole_s > 0]
    return sorted(worth, key=lambda span: -span.took_s)[:most] if len(found) > 1 else []


def went_on(parts: Mapping[str, float | None]) -> bool:
    """Whether the job caught up without any sign of a restart."""
    return parts.get("caught_up") is not None and all(parts.get(part) is None for part in _RESTART)


def outcome_in_words(recovery: Recovery) -> str:
    """How a recovery ended, such as `caught up after 6.84 s, 5 steps done again`."""
    at, lost = recovery.parts.get("caught_up"), recovery.lost_steps
    lasted = "" if recovery.lasted_s is None else f" (the fault itself lasted {seconds_in_words(recovery.lasted_s)})"
    if at is None:
        return f"never caught up{lasted}"
    how = "went on without a restart" if went_on(recovery.parts) else "caught up"
    steps = f"{lost or 'no'} {'step' if lost == 1 else 'steps'} done again"
    again = "steps done again: not known" if lost is None else steps
    return f"{how} after {seconds_in_words(at)}{lasted}, {again}"


def bar(span: Span, whole_s: float, width: int, marks: Marks) -> str:
    """The span as a bar, exact to half a character cell if `marks` has half cells. A span that has ended gets at least
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
