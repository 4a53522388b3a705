"""Shows the repetitions of a scenario, judged together, on a terminal and in JUnit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.result import SCHEMA, Case, Result, Verdict
from torchaos.harness.record.words import rounded
from torchaos.harness.release.repeats.figures import Distribution
from torchaos.harness.release.repeats.judged import Rate, Repeats
from torchaos.harness.telling.terminal.pen import COLOURS, Pen
from torchaos.harness.telling.terminal.text import name_in_words

_NAME, _COLUMN = 34, 9


def show(repeats: Repeats, console: Console) -> None:
    """Prints the verdict, rates with their bounds, and the distribution of every figure."""
    pen = Pen(console)
    badge = Text(f" {repeats.verdict.value.upper()} ", f"bold reverse {COLOURS[repeats.verdict]}")
    pen.gap()
    name = pen.text(f"{repeats.scenario}, {len(repeats.seeds)} of {repeats.times} repetitions", "bold")
    pen.row([(badge, badge.cell_len), (name, name.cell_len + 1)], pen.text(repeats.asked, "dim"), indent=0)
    pen.row([], pen.text(repeats.reason), indent=1)
    for note in repeats.notes:
        pen.row([], pen.text(note, "yellow"), indent=1)
    if repeats.seeds:
        _rates(pen, repeats)
        _figures(pen, [figure for figure in repeats.figures if figure.count and not _is_dull(figure)])
    pen.gap()


def _rates(pen: Pen, repeats: Repeats) -> None:
    pen.heading("Rates", f"true rate: bounds with {100 * repeats.confidence:g} % confidence each")
    _head(pen, ["passed", "failed", "inconcl.", "at least"], "at most")
    for rate in (repeats.rate, *repeats.cases):
        cells = [str(rate.passed), str(rate.failed), str(rate.inconclusive), _share(rate.low)]
        _line(pen, "the scenario" if rate is repeats.rate else name_in_words(rate.name), cells, _share(rate.high))


def _figures(pen: Pen, figures: list[Distribution]) -> None:
    pen.heading("Figures", "over the repetitions that passed or failed")
    _head(pen, ["min", "median", "p90", "max"], "not seen")
    for distribution in figures:
        cells = [
            _number(value, distribution.seconds)
            for value in (distribution.min, distribution.median, distribution.p90, distribution.max)
        ]
        _line(pen, name_in_words(distribution.name), cells, f"in {distribution.unseen}" if distribution.unseen else "")


def _head(pen: Pen, titles: list[str], last: str) -> None:
    _line(pen, "", titles, last, "dim")


def _line(pen: Pen, name: str, cells: list[str], last: str, style: str = "") -> None:
    pen.row([(pen.text(name), _NAME), *((Text(f"{cell:>{_COLUMN}}", style), _COLUMN) for cell in cells)],
            pen.text(last, style), indent=3)  # fmt: skip


def _is_dull(distribution: Distribution) -> bool:
    """Whether an assertion's number was the same in each repetition, such as the number of checkpoints."""
    return ": " in distribution.name and distribution.min == distribution.max


def _number(value: float | None, seconds: bool) -> str:
    if value is None:
        return "-"
    return rounded(value) if seconds else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "no SciPy" if value is None else f"{value:.1%}"


def as_result(repeats: Repeats) -> Result:
    """The result for JUnit: one case for all repetitions, with the figures in its text."""
    measured: dict[str, Any] = {"repetitions": len(repeats.seeds), **_counts(repeats.rate)}
    measured |= {f"rate of {one.name}": _in_words(one) for one in (repeats.rate, *repeats.cases)}
    for figure in repeats.figures:
        spread = {"min": figure.min, "median": figure.median, "p90": figure.p90, "max": figure.max}
        seen = {"seen": figure.count, "not seen": figure.unseen}
        measured[figure.name + (", seconds" if figure.seconds else "")] = {**spread, **seen}
    case = Case("repetitions", "assertion", repeats.verdict, repeats.reason, measured, {"asked": repeats.asked})
    seed = repeats.seeds[0] if repeats.seeds else 0
    return Result(
        repeats.scenario, repeats.description, seed, repeats.verdict, repeats.exit_code, repeats.reason, "", "", 0.0,
        cases=(case,), notes=repeats.notes, schema=SCHEMA,
    )  # fmt: skip


def as_json(repeats: Repeats) -> dict[str, Any]:
    return {**asdict(repeats), "verdict": Verdict(repeats.verdict).value, "exit_code": int(repeats.exit_code)}


def _counts(rate: Rate) -> dict[str, int]:
    return {"passed": rate.passed, "failed": rate.failed, "inconclusive": rate.inconclusive}


def _in_words(rate: Rate) -> str:
    counted = f"{rate.passed} passed, {rate.failed} failed, {rate.inconclusive} inconclusive"
    if rate.low is None or rate.high is None:
        return counted
    return f"{counted}; true rate {rate.low:.1%} to {rate.high:.1%}"
