"""Prints many runs, or the comparison of two sets of runs, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.result import Verdict
from torchaos.harness.record.words import seconds_in_words
from torchaos.harness.telling.terminal.pen import COLOURS, Pen
from torchaos.harness.telling.terminal.why import why
from torchaos.harness.telling.trends.compare import Change, Row, overall
from torchaos.harness.telling.trends.nights import Night
from torchaos.harness.telling.trends.store import Kept

_COLOURS = {Change.BETTER: "green", Change.WORSE: "red", Change.UNCLEAR: "yellow", Change.SAME: "", Change.NEW: ""}
_NAME, _WHAT, _VALUE = 28, 17, 18  # columns


def history(runs: Sequence[Kept], console: Console) -> None:
    """Prints a line per run, by scenario, in order of time."""
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
            told = "" if result.verdict is Verdict.PASSED else f": {why(result).lead}"
            cells = [
                (pen.mark(result.verdict), 1), (pen.text(result.started[:19]), 19), (pen.text(kept.commit[:12]), 13),
                (pen.text(result.seed), 5), (pen.text(caught), 10), (pen.text("" if lost is None else lost), 5),
            ]  # fmt: skip
            pen.row(cells, pen.text(f"{result.verdict.value}{told}", "" if not told else COLOURS[result.verdict]))
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
