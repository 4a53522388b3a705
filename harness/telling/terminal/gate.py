"""Prints the result of a release gate on a terminal: each scenario, its values and bounds, failures and waivers."""

from __future__ import annotations

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


def show(judged: Judged, console: Console) -> None:
    """Prints the result of a gate, readable at 80 columns, without colour, and in ASCII."""
    pen = Pen(console)
    word, colour = ("OPEN", "green") if judged.exit_code is ExitCode.PASSED else ("CLOSED", "red")
    badge = Text(f" {word} ", f"bold reverse {colour}")
    red = [one for one in judged.results if one.verdict is not Verdict.PASSED]
    counted = f"{len(judged.results) - len(red)} of {len(judged.results)} hold"
    pen.gap()
    name = pen.text(f"{judged.gate}, {judged.environment}", "bold")
    pen.row([(badge, badge.cell_len), (name, name.cell_len + 1)], pen.text(counted, "dim"), indent=0)
    for result in judged.results:
        _result(pen, result)
    for one in judged.repeats:
        show_repeats(one, console)
    pen.gap()


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
    if others:
        names = ", ".join(name_in_words(case.name) for case in others)
        pen.row([(pen.mark(Verdict.PASSED), 1)], pen.text(names, "dim"), indent=3)
    if result.run_dir:
        pen.long_line(pen.text("files", "dim"), 5, result.run_dir)


def _needs_line(result: Result, case: Case) -> bool:
    """Whether the case needs a line of its own: it did not pass, it is waived, or one of its values has a bound."""
    bounded = any(name in case.measured for name in case.bound)
    return case.verdict is not Verdict.PASSED or result.scenario == WAIVERS or is_waived(case) or bounded
