"""Prints the result of a run on a terminal: first the verdict and its reason, then the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.plan import counted, seconds_in_words
from torchaos.harness.record.result import Case, FaultResult, Recovery, Result, Verdict, root_first
from torchaos.harness.record.secrecy import mask
from torchaos.harness.reporting.terminal import recovery_timeline
from torchaos.harness.reporting.terminal.brief import brief, headline, without_words
from torchaos.harness.reporting.terminal.plan_preview import catalogue, plan, ready_scenarios, summary_of, warnings
from torchaos.harness.reporting.terminal.text import (
    COLOURS,
    Pen,
    measured_in_words,
    name_in_words,
    pairs_in_words,
    value_in_words,
)

__all__ = ["catalogue", "plan", "ready_scenarios", "show", "summary", "summary_of", "warnings"]

_LABEL, _PART = 10, 15  # columns: a label such as "rollback"; the name of a part of a recovery
_LONGEST_BAR, _LONGEST_NAME = 60, 28


def show(result: Result, console: Console, report: Path | None = None, *, whole: bool = True) -> None:
    """Prints the facts of one scenario, or in short (not `whole`) only the important ones. Readable at 80 columns,
    without colour, and in ASCII. `report`: the path of its page."""
    if whole:
        _whole(result, console, report)
    else:
        brief(result, console, report)


def _whole(result: Result, console: Console, report: Path | None) -> None:
    pen = Pen(console)
    headline(pen, result)
    if result.description:
        pen.gap()
        pen.row([], pen.text(result.description, "dim"), indent=1)
    if result.faults:
        pen.heading("Faults")
        for fault in result.faults:
            _fault(pen, fault)
    for recovery in result.recoveries:
        _recovery(pen, recovery)
    if result.cases:
        pen.heading("Verdicts")
        width = 1 + min(_LONGEST_NAME, max(len(name_in_words(case.name)) for case in result.cases))
        for case in _folded([replace(one, reason=without_words(one.reason, result)) for one in result.cases]):
            _case(pen, case, width)
    if result.notes:
        pen.heading("Notes")
        for note in result.notes:
            pen.row([(pen.text(pen.marks.dot, "dim"), 1)], pen.text(note), indent=3)
    _footer(pen, result, report)
    pen.gap()


def _fault(pen: Pen, fault: FaultResult) -> None:
    title = pen.text(f"{fault.inject} {pen.marks.arrow} {fault.target}", "bold")
    if fault.id != fault.inject:
        title.append("  ").append_text(pen.text(fault.id, "dim"))
    pen.row([(pen.mark(fault.verdict), 1)], title, indent=3)
    rows = {
        "planned": fault.planned,
        "applied": fault.applied or "never",
        "evidence": fault.evidence or "none that it was felt",
        "rollback": fault.rollback,
    }
    if fault.imitates:
        rows["synthetic"] = f"it imitates {fault.imitates}"
    if fault.replays:
        rows["replayed"] = f"it says again what {fault.replays} said"
    if fault.measured:
        rows["measured"] = measured_in_words(fault.measured)
    if fault.verdict is not Verdict.PASSED:
        rows["verdict"] = f"{fault.verdict.value}: {fault.reason}"
    for label, text in rows.items():
        pen.row([(pen.text(label, "dim"), _LABEL)], pen.text(text), indent=5)


def _recovery(pen: Pen, recovery: Recovery) -> None:
    whole = max((at for at in recovery.parts.values() if at is not None), default=0.0)
    pen.heading("Recovery", f"from {recovery.fault}: {recovery_timeline.outcome_in_words(recovery)}")
    found = recovery_timeline.spans(recovery.parts)
    slowest = max(found, key=lambda span: span.took_s, default=None)
    width = min(_LONGEST_BAR, pen.width - 31 - _PART)
    for span in found:
        emphasis = "bold" if span is slowest and span.took_s > 0 else ""
        name = pen.text(recovery_timeline.over_in_words(span.part), emphasis)
        if span.end_s is None:
            pen.row([(name, _PART)], Text("  not seen", "dim"), indent=3)
            continue
        at = Text(f"{seconds_in_words(span.end_s):>10}", emphasis)
        took = Text(f"{'+' + seconds_in_words(span.took_s):>11}", "dim")
        bar = Text(recovery_timeline.bar(span, whole, width, pen.marks), "bold cyan" if emphasis else "cyan")
        pen.row([(name, _PART), (at, 10), (took, 12)], bar, indent=3)
    if most := recovery_timeline.longest(recovery.parts):
        told = ", ".join(
            f"{recovery_timeline.spent_in_words(one.part)} {100 * one.took_s / whole:.0f} %" for one in most
        )
        pen.row([], pen.text(f"Most of it: {told}"), indent=3)
    for text in recovery.advice:
        pen.row([(pen.text(pen.marks.dot, "dim"), 1)], pen.text(text), indent=3)


def _case(pen: Pen, case: Case, width: int) -> None:
    name = pen.text(name_in_words(case.name), "" if case.verdict is Verdict.PASSED else "bold")
    pen.row([(pen.mark(case.verdict), 1), (name, width)], pen.text(case.full_reason), indent=3)
    if figures := against(case):
        pen.row([(Text(), 1), (Text(), width)], pen.text(figures, "dim"), indent=3)


def _folded(cases: Sequence[Case]) -> list[Case]:
    """The cases in the order of reports. Cases that can't be judged for the same reason are one."""
    found: dict[object, Case] = {}
    for case in root_first(cases):
        blind = case.verdict is Verdict.INCONCLUSIVE and not case.measured
        key: object = case.reason if blind else case.name
        same = found.get(key)
        found[key] = replace(same, name=f"{same.name}, {case.name}", bound={}) if same else case
    return [*found.values()]


def against(case: Case) -> str:
    """The measured values with their bounds. If the case passed, only values with a bound."""
    both = {name: bound for name, bound in case.bound.items() if name in case.measured}
    parts = [
        f"{name_in_words(name)} {value_in_words(name, case.measured[name], case.seconds)} "
        f"(bound {value_in_words(name, bound, case.seconds)})"
        for name, bound in both.items()
    ]
    bounds = {name: bound for name, bound in case.bound.items() if name not in both}
    parts += [f"bound: {pairs_in_words(bounds, case.seconds)}"] if bounds else []
    rest = {name: value for name, value in case.measured.items() if name not in both and value is not None}
    parts += [f"measured: {pairs_in_words(rest, case.seconds)}"] if rest and case.verdict is not Verdict.PASSED else []
    return "; ".join(parts)


def _footer(pen: Pen, result: Result, report: Path | None) -> None:
    pen.gap()
    attempts = f"{result.attempts} {'attempt' if result.attempts == 1 else 'attempts'}"
    steps = "no step was seen" if result.steps is None else counted(result.steps, "step")
    about = {
        "Job": f"{steps}, {attempts}" if result.attempts else "",
        "Twin": result.twin,
        "Versions": ", ".join(f"{name} {version}" for name, version in result.versions.items() if version),
    }
    for label, text in about.items():
        if text:
            pen.row([(pen.text(label, "dim"), _LABEL)], pen.text(text))
    lines = {
        "Files": result.run_dir,
        "Report": str(report or ""),
        "Reproduce": mask(result.reproduce),
    }
    for label, text in lines.items():
        if text:
            pen.long_line(pen.text(label, "dim"), _LABEL, text)


def summary(results: Sequence[Result], console: Console) -> None:
    """Prints a line for each scenario."""
    pen = Pen(console)
    name_width = 1 + min(_LONGEST_NAME, max((len(result.scenario) for result in results), default=0))
    pen.heading("Summary")
    head = [("", 1), ("scenario", name_width), ("seed", 6), ("time", 8), ("caught up", 10), ("lost", 5)]
    pen.row([(Text(title, "dim"), width) for title, width in head], Text("verdict", "dim"))
    for result in results:
        caught = [recovery.parts.get("caught_up") for recovery in result.recoveries]
        lost = [recovery.lost_steps for recovery in result.recoveries]
        cells = [
            (pen.mark(result.verdict), 1),
            (pen.text(result.scenario), name_width),
            (pen.text(result.seed), 6),
            (pen.text(seconds_in_words(result.duration_s)), 8),
            (pen.text(_most(caught, "never", seconds_in_words)), 10),
            (pen.text(_most(lost, "?", str)), 5),
        ]
        pen.row(cells, pen.text(result.verdict.value, COLOURS[result.verdict]))
    counts = Counter(result.verdict for result in results)
    counted = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    pen.gap()
    pen.row([], pen.text(f"{len(results)} {'run' if len(results) == 1 else 'runs'}: {counted}", "bold"))
    pen.gap()


def _most(values: Sequence[float | None], unknown: str, words: Callable[[float], str]) -> str:
    """The largest value of several recoveries, or the text `unknown` if a value is unknown."""
    known = [value for value in values if value is not None]
    return "" if not values else unknown if len(known) < len(values) else words(max(known))
