"""Prints the result of a release gate on a terminal: each scenario, its values and bounds, failures and waivers."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.release.gate.judged import WAIVERS, Judged
from torchaos.harness.release.gate.waivers import is_waived
from torchaos.harness.telling.terminal.console import against
from torchaos.harness.telling.terminal.pen import Pen
from torchaos.harness.telling.terminal.repeats import show as show_repeats
from torchaos.harness.telling.terminal.text import name_in_words

_LONGEST = 34
_MOST = 3  # failures of a scenario, in short


def show(judged: Judged, console: Console, *, whole: bool = True) -> None:
    """Prints the result of a gate, readable at 80 columns, without colour, and in ASCII. In short (not `whole`), a
    scenario that passed is a line."""
    pen = Pen(console)
    word, colour = ("OPEN", "green") if judged.exit_code is ExitCode.PASSED else ("CLOSED", "red")
    badge = Text(f" {word} ", f"bold reverse {colour}")
    red = [one for one in judged.results if one.verdict is not Verdict.PASSED]
    counted = f"{len(judged.results) - len(red)} of {len(judged.results)} hold"
    pen.gap()
    name = pen.text(f"{judged.gate}, {judged.environment}", "bold")
    pen.row([(badge, badge.cell_len), (name, name.cell_len + 1)], pen.text(counted, "dim"), indent=0)
    if not whole:
        pen.gap()
    for result in judged.results:
        (_result if whole else _brief)(pen, result)
    for one in judged.repeats:
        show_repeats(one, console)
    pen.gap()


def _brief(pen: Pen, result: Result) -> None:
    """The scenario with what is waived, and with the failures that follow from no other."""
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
        pen.row([(pen.mark(cases[0].verdict), 1), (name, name.cell_len)], pen.text(reason), indent=3, most=2)
        _hint(pen, result, cases[0])
    left = len(red) - sum(len(cases) for cases in [*told.values()][:_MOST])
    if left:
        pen.row([], pen.text(f"and {left} more", "dim"), indent=5)
    if red and result.run_dir:
        pen.long_line(pen.text("more", "dim"), 5, f"torchaos judge -v {shlex.quote(result.run_dir)}")


def _hint(pen: Pen, result: Result, case: Case) -> None:
    """What to do about a failure that follows from one that is waived."""
    if case.follows and any(is_waived(other) and other.name.startswith(case.follows) for other in result.cases):
        words = f"it follows from {case.follows}, which is waived: waive {case.name} too, if it may fail for that"
        pen.row([], pen.text(words, "yellow"), indent=5)


def _result(pen: Pen, result: Result) -> None:
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
        _hint(pen, result, case)
    if others:
        names = ", ".join(name_in_words(case.name) for case in others)
        pen.row([(pen.mark(Verdict.PASSED), 1)], pen.text(names, "dim"), indent=3)
    if result.run_dir:
        pen.long_line(pen.text("files", "dim"), 5, result.run_dir)


def _needs_line(result: Result, case: Case) -> bool:
    """Whether the case needs a line of its own: it did not pass, it is waived, or one of its values has a bound."""
    bounded = any(name in case.measured for name in case.bound)
    return case.verdict is not Verdict.PASSED or result.scenario == WAIVERS or is_waived(case) or bounded
