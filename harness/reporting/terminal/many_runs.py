"""Prints the results of many runs on a terminal: the history, the comparison of two sets of runs, the repetitions of a
scenario (also for JUnit), a release gate, and an exploration."""

from __future__ import annotations

import shlex
from collections.abc import Container, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from torchaos.harness.crash_explorer.exploration_summary import NAME as SCRIPT
from torchaos.harness.crash_explorer.exploration_summary import ExplorationSummary, told
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, OutcomeClass, is_suspected
from torchaos.harness.record.plan import counted, enumerated, rounded, seconds_in_words
from torchaos.harness.record.result import SCHEMA, Case, ExitCode, Result, Verdict
from torchaos.harness.release.gate_verdict import WAIVERS, Judged, is_waived
from torchaos.harness.release.repeats import Distribution, Rate, Repeats
from torchaos.harness.reporting.compare_runs import Change, Night, Row, overall
from torchaos.harness.reporting.terminal.console import against, why
from torchaos.harness.reporting.terminal.text import COLOURS, Pen, name_in_words
from torchaos.harness.reporting.trend_store import Kept

_COLOURS = {Change.BETTER: "green", Change.WORSE: "red", Change.UNCLEAR: "yellow", Change.SAME: "", Change.NEW: ""}
_NAME, _WHAT, _VALUE = 28, 17, 18  # columns


def history(runs: Sequence[Kept], console: Console) -> None:
    """Prints a line for each run, by scenario, in order of time; below a run that did not pass, a line with its
    cause."""
    pen = Pen(console)
    for name in dict.fromkeys(kept.result.scenario for kept in runs):
        pen.heading(name)
        head = [("", 1), ("started", 19), ("commit", 13), ("seed", 5), ("caught up", 10), ("again", 5)]
        pen.row([(Text(title, "dim"), width) for title, width in head], Text("verdict", "dim"))
        for kept in (kept for kept in runs if kept.result.scenario == name):
            result, lost = kept.result, kept.lost_steps
            caught = (
                ""
                if not result.recoveries
                else "never"
                if kept.caught_up_s is None
                else seconds_in_words(kept.caught_up_s)
            )
            cells = [
                (pen.mark(result.verdict), 1), (pen.text(result.started[:19]), 19), (pen.text(kept.commit[:12]), 13),
                (pen.text(result.seed), 5), (pen.text(caught), 10), (pen.text("" if lost is None else lost), 5),
            ]  # fmt: skip
            right = result.verdict is Verdict.PASSED
            pen.row(cells, pen.text(result.verdict.value, "" if right else COLOURS[result.verdict]))
            if not right:
                pen.row([], pen.text(why(result).lead, "dim"), indent=3, most=1)
    pen.gap()


def nights(days: Sequence[Night], console: Console) -> None:
    """Prints a line per game day, by name, in order of time."""
    pen = Pen(console)
    for name in dict.fromkeys(night.name for night in days):
        pen.heading(name)
        head = [("started", 19), ("commit", 13), ("seed", 5), ("ETTR", 7), ("caught up", 10), ("faults", 6)]
        pen.row([(Text(title, "dim"), width) for title, width in head], Text("verdict", "dim"))
        for day in (day for day in days if day.name == name):
            caught = seconds_in_words(fmean(day.caught_up_s)) if day.caught_up_s else ""
            cells = [
                (pen.text(day.started[:19]), 19), (pen.text(day.commit[:12]), 13), (pen.text(day.seed), 5),
                (pen.text("" if day.ettr is None else f"{day.ettr:.1%}"), 7), (pen.text(caught), 10),
                (pen.text(sum(day.outcomes.values())), 6),
            ]  # fmt: skip
            why = "" if day.verdict == "passed" else f": {day.why}"
            pen.row(cells, pen.text(f"{day.verdict}{why}", "red" if why else ""))
    if days:
        pen.gap()


def comparison(rows: Sequence[Row], console: Console) -> None:
    pen, verdict = Pen(console), overall(rows)
    badge = Text(f" {verdict.value.upper()} ", f"bold reverse {_COLOURS[verdict]}")
    pen.gap()
    pen.row([(badge, badge.cell_len)], pen.text(_IN_WORDS[verdict]), indent=0)
    for name in dict.fromkeys(row.scenario for row in rows):
        pen.heading(name)
        for row in (one for one in rows if one.scenario == name):
            cells = [
                (pen.text(row.what), _WHAT), (pen.text(row.before), _VALUE), (pen.text(pen.marks.arrow), 2),
                (pen.text(row.after), _VALUE),
            ]  # fmt: skip
            words = row.change.value + (f": {row.why}" if row.why else "")
            pen.row(cells, pen.text(words, _COLOURS[row.change]), indent=3)
    pen.gap()


_IN_WORDS = {
    Change.WORSE: "there is a regression",
    Change.UNCLEAR: "this is no proof that nothing got worse",
    Change.BETTER: "nothing got worse, and something got better",
    Change.SAME: "nothing got worse",
}


_VALUE_NAME, _COLUMN = 34, 9


def show_repeats(repeats: Repeats, console: Console) -> None:
    """Prints the verdict, rates with their bounds, and the distribution of every figure."""
    pen = Pen(console)
    name = f"{repeats.scenario}, {len(repeats.seeds)} of {repeats.times} repetitions"
    pen.banner(repeats.verdict.value.upper(), COLOURS[repeats.verdict], name, repeats.asked)
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
    pen.row([(pen.text(name), _VALUE_NAME), *((Text(f"{cell:>{_COLUMN}}", style), _COLUMN) for cell in cells)],
            pen.text(last, style), indent=3)  # fmt: skip


def _is_dull(distribution: Distribution) -> bool:
    """Whether the number that an assertion measured is the same in each repetition, such as the number of
    checkpoints."""
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


_LONGEST = 34
_MOST = 3  # failures of a scenario, in short


def show_gate(judged: Judged, console: Console, *, whole: bool = True) -> None:
    """Prints the result of a gate, readable at 80 columns, without colour, and in ASCII. If `whole` is false, a
    scenario that passed gets one line."""
    pen = Pen(console)
    word, colour = ("OPEN", "green") if judged.exit_code is ExitCode.PASSED else ("CLOSED", "red")
    red = [one for one in judged.results if one.verdict is not Verdict.PASSED]
    counted = f"{len(judged.results) - len(red)} of {len(judged.results)} hold"
    pen.banner(word, colour, f"{judged.gate}, {judged.environment}", counted)
    if not whole:
        pen.gap()
    waivers = {case.name for result in judged.results if result.scenario == WAIVERS for case in result.cases}
    for result in judged.results:
        (_result if whole else _brief)(pen, result, waivers)
    for one in judged.repeats:
        show_repeats(one, console)
    pen.gap()


def _brief(pen: Pen, result: Result, waivers: Container[str]) -> None:
    """Prints a scenario with its waived cases and its failures. Failures that follow from another failure are left
    out."""
    title = pen.text(result.scenario, "bold")
    waived = [name_in_words(case.name) for case in result.cases if is_waived(case)]
    head = [(pen.mark(result.verdict), 1), (title, title.cell_len)]
    pen.row(head, pen.text("; ".join(waived), "dim"))
    red = [case for case in result.cases if case.verdict is not Verdict.PASSED]
    roots = [case for case in red if case.follows not in {other.name for other in red}]
    told: dict[str, list[Case]] = {}
    for case in roots:
        told.setdefault(case.reason, []).append(case)
    for reason, cases in [*told.items()][:_MOST]:
        name = pen.text(f"{', '.join(name_in_words(case.name) for case in cases)}:", "bold")
        pen.row([(pen.mark(cases[0].verdict), 1), (name, name.cell_len)], pen.text(reason), indent=3, most=4)
    left = len(red) - sum(len(cases) for cases in [*told.values()][:_MOST])
    if left:
        pen.row([], pen.text(f"and {left} more", "dim"), indent=5)
    _hint(pen, result, waivers)
    if red and result.run_dir:
        pen.long_line(pen.text("more", "dim"), 5, f"torchaos judge -v {shlex.quote(result.run_dir)}")


def _hint(pen: Pen, result: Result, waivers: Container[str]) -> None:
    """Prints what to do about failures that follow from a waived failure. Failures with an invalid waiver are left out:
    their reason says it already."""
    waived = [case.name for case in result.cases if is_waived(case)]
    follow: dict[str, list[str]] = {}
    for case in result.cases:
        red = case.verdict is not Verdict.PASSED and f"{result.scenario}: {case.name}" not in waivers
        if red and any(name.startswith(case.follows or "\n") for name in waived):
            follow.setdefault(str(case.follows), []).append(case.name)
    for cause, names in follow.items():
        subject = "it follows" if len(names) == 1 else f"{len(names)} of these follow"
        words = f"{subject} from {cause}, which is waived: waive {enumerated(names)} too, if it may fail for that"
        pen.row([], pen.text(words, "yellow"), indent=5)


def _result(pen: Pen, result: Result, waivers: Container[str]) -> None:
    title = pen.text(result.scenario, "bold")
    about = f"seed {result.seed}, {result.started[:16].replace('T', ' ')} UTC" if result.run_dir else ""
    pen.gap()
    pen.row([(pen.mark(result.verdict), 1), (title, title.cell_len + 1)], pen.text(about))
    others = [case for case in result.cases if not _needs_line(result, case)]
    shown = [case for case in result.cases if case not in others]
    width = 1 + min(_LONGEST, max((len(name_in_words(case.name)) for case in shown), default=0))
    for case in shown:
        name = pen.text(name_in_words(case.name), "" if case.verdict is Verdict.PASSED else "bold")
        pen.row([(pen.mark(case.verdict), 1), (name, width)], pen.text(case.reason), indent=3)
        if figures := against(case):
            pen.row([(Text(), 1), (Text(), width)], pen.text(figures, "dim"), indent=3)
    _hint(pen, result, waivers)
    if others:
        names = ", ".join(name_in_words(case.name) for case in others)
        pen.row([(pen.mark(Verdict.PASSED), 1)], pen.text(names, "dim"), indent=3)
    if result.run_dir:
        pen.long_line(pen.text("files", "dim"), 5, result.run_dir)


def _needs_line(result: Result, case: Case) -> bool:
    """Whether the case needs a line of its own: it did not pass, it is waived, it is about a waiver itself, or one of
    its values has a bound."""
    bounded = any(name in case.measured for name in case.bound)
    return case.verdict is not Verdict.PASSED or result.scenario == WAIVERS or is_waived(case) or bounded


_STATE_NAME = 17  # columns
_STATE_REASON = 80  # characters


def tell_outcome(outcome: Outcome, number: int, of: int) -> str:
    """Prints a line about a state that was just tried."""
    right = outcome.kind is OutcomeClass.RIGHT
    how = ", cold" if not outcome.warm else "" if right else "; not confirmed by a cold start"
    how = f"; the same failure by a cold start: {outcome.shown_by}" if outcome.shown_by else how
    why = "" if right else f": {_cut(outcome.reason)}"
    if outcome.like:
        return f"{number}/{of} {outcome.state}: {outcome.kind.value}, as {outcome.like}, which is the same for the job"
    return f"{number}/{of} {outcome.state}: {outcome.kind.value}{why} ({outcome.seconds:.1f} s{how})"


def _cut(text: str) -> str:
    """The text, cut to the length of a state's line; the report has all of it."""
    return text if len(text) <= _STATE_REASON else f"{text[:_STATE_REASON].rstrip()}..."


def show(found: ExplorationSummary, result: Result, console: Console) -> None:
    """Prints the verdict, the classes that occurred, and the story of the smallest state that fails. Each reason is
    told once. How the resumes were started is only in the report."""
    pen = Pen(console)
    pen.gap()
    pen.row([(pen.mark(result.verdict), 1)], pen.text(f"{result.verdict.value}: {result.reason}", "bold"), most=4)
    pen.heading("Outcomes", f"{len(found.outcomes)} of {found.choice.in_all} states")
    for kind in OutcomeClass:
        if not (own := found.of(kind)):
            continue
        words = told(own) if kind is not OutcomeClass.RIGHT else ""
        words = "" if words in result.reason else words
        pen.row([(pen.text(kind.value), _STATE_NAME), (pen.text(f"{len(own):>5}"), 7)], pen.text(words), indent=3)
    share = found.fatal_share
    if share is not None:
        of = f"{seconds_in_words(found.fatal_s)} of {seconds_in_words(found.tried_s)}"
        if found.unconfirmed_fatal_s:
            of += f"; {seconds_in_words(found.unconfirmed_fatal_s)} of this not confirmed by a cold start"
        pen.row(
            [(pen.text("a death is fatal"), _STATE_NAME)],
            pen.text(f"in {share:.1%} of the run's time ({of})"),
            indent=3,
        )
    if smallest := found.smallest:
        _story(smallest, result.reason, pen)
    for note in [*found.notes, *found.recording.unsure]:
        pen.row([(pen.text("note:", "yellow"), 6)], pen.text(note), indent=1, most=2)
    pen.gap()
    pen.long_line(pen.text("Files:"), 7, result.run_dir)


def _story(one: Outcome, headline: str, pen: Pen) -> None:
    pen.heading(
        "The smallest",
        f"{one.state}: {one.model} at step {one.died_at_step}, after {counted(one.operations, 'operation')}",
    )
    pen.row([(pen.text("last operation"), _STATE_NAME)], pen.text(one.last_operation or "none"), indent=3)
    for path, what in one.files:
        pen.row([(pen.text(path), 40)], pen.text(what), indent=3)
    doubt = " (not confirmed by a cold start)" if is_suspected(one) else ""
    why = "" if one.reason in headline else f": {one.reason}"
    pen.row([(pen.text("then"), _STATE_NAME)], pen.text(f"{one.kind.value}{doubt}{why}"), indent=3)
    if one.mended is not None:
        again = "gets past the death" if one.mended else "fails as well"
        pen.row([(pen.text("a second start"), _STATE_NAME)], pen.text(again), indent=3)
    if one.run_dir:
        pen.long_line(pen.text("shown by"), _STATE_NAME, f"sh {one.run_dir}/{SCRIPT}")
