"""Prints the result of a run in a few lines: the verdict and its cause, what else failed, and where to read more."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.result import Case, FaultResult, Result, Verdict, root_first
from torchaos.harness.record.secrecy import mask
from torchaos.harness.record.words import seconds_in_words
from torchaos.harness.telling.terminal import timeline
from torchaos.harness.telling.terminal.pen import COLOURS, Pen
from torchaos.harness.telling.terminal.text import name_in_words
from torchaos.harness.telling.terminal.why import why

_LABEL = 10  # columns: a label such as "Reproduce"
_MOST = 3  # rows of faults, of failed cases and of notes


def brief(result: Result, console: Console, report: Path | None = None) -> None:
    """Prints the result in about 15 lines; no thing is said twice. `report`: the path of its page."""
    pen = Pen(console)
    headline(pen, result, most=4)
    for fault, words in [*_faults(result)][:_MOST]:
        title = pen.text(f"{fault.inject} {pen.marks.arrow} {fault.target}:")
        pen.row([(pen.mark(fault.verdict), 1), (title, title.cell_len)], pen.text(words), indent=3, most=1)
    others = _others(result)
    for case in others[:_MOST]:
        name = pen.text(f"{name_in_words(case.name)}:", "bold")
        pen.row([(pen.mark(case.verdict), 1), (name, name.cell_len)], pen.text(case.reason), indent=3, most=2)
    for verdict in (Verdict.INCONCLUSIVE, Verdict.PASSED):
        names = [name_in_words(case.name) for case in result.cases if case.verdict is verdict and case not in others]
        if names and result.steps is not None and (verdict is not result.verdict or verdict is Verdict.PASSED):
            pen.row([(pen.mark(verdict), 1)], pen.text(", ".join(names), "dim"), indent=3, most=2)
    for note in [note for note in result.notes if note not in result.reason][:_MOST]:
        pen.row([(pen.text("note", "dim"), 4)], pen.text(note), indent=3, most=1)
    more = f"torchaos judge -v {shlex.quote(result.run_dir)}" if result.run_dir else ""
    again = "" if result.verdict is Verdict.PASSED else mask(result.reproduce)
    pen.gap()
    for label, text in (("Report", str(report or "")), ("More", more), ("Reproduce", again)):
        if text:
            pen.long_line(pen.text(label, "dim"), _LABEL, text)
    pen.gap()


def headline(pen: Pen, result: Result, most: int = 0) -> None:
    """Prints the verdict and its reason. `most`: the most lines of each sentence; 0: no limit."""
    badge = Text(f" {result.verdict.value.upper()} ", f"bold reverse {COLOURS[result.verdict]}")
    about = f"seed {result.seed}, {seconds_in_words(result.duration_s)}"
    pen.gap()
    name = pen.text(result.scenario, "bold")
    pen.row([(badge, badge.cell_len), (name, name.cell_len + 1)], pen.text(about, "dim"), indent=0)
    told = why(result)
    pen.row([], pen.text(f"{told.lead}.", "bold"), indent=1, most=most)
    for line in told.log:
        pen.row([(pen.text("|", "dim"), 1)], pen.text(line), indent=3, most=most)
    for text in filter(None, (told.failures, told.more)):
        pen.row([], pen.text(f"{text}."), indent=1, most=most)
    undone = [case for case in result.cases if case.kind == "rollback" and case.verdict is not Verdict.PASSED]
    if undone and result.verdict is not Verdict.ERROR:
        pen.row([], pen.text(f"rollback incomplete: {undone[0].reason}", "bold red"), indent=1)


def _faults(result: Result) -> Iterator[tuple[FaultResult, str]]:
    """The faults that landed, or that the reason does not explain, each with how it ended."""
    for fault in result.faults:
        ends = [timeline.outcome_in_words(one) for one in result.recoveries if one.fault == fault.id]
        if ends:
            yield fault, ends[-1] if fault.proved or fault.reason in result.reason else fault.reason
        elif fault.applied or (fault.reason not in result.reason and result.steps is not None):
            yield fault, "landed" if fault.proved else fault.reason


def _others(result: Result) -> list[Case]:
    """The cases with the verdict of the run that the headline does not explain. Without a step, all have one cause."""
    if not result.decided_by or result.steps is None:
        return []
    found: dict[str, Case] = {}
    for case in root_first(result.cases):
        said = case.name == result.decided_by or case.follows or case.kind == "faults" or case.reason in result.reason
        if case.verdict is result.verdict and not said:
            found.setdefault(case.reason, case)
    return [*found.values()]
