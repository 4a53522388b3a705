"""Prints a game day on a terminal, in a few lines: the verdict, how the faults ended, and what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchaos.harness.gameday.day import Day
from torchaos.harness.gameday.report import again_in_words, faults_of, to_look_at
from torchaos.harness.gameday.score import RoundScore, Score
from torchaos.harness.gameday.verdict import verdict_of
from torchaos.harness.record.result import Case
from torchaos.harness.record.words import seconds_in_words
from torchaos.harness.telling.terminal.pen import COLOURS, Pen

_LABEL, _MOST = 10, 3


def show(
    day: Day, folder: str, rounds: Sequence[RoundScore], score: Score, cases: Sequence[Case], console: Console
) -> None:
    pen = Pen(console)
    code, why = verdict_of(cases)
    verdict = code.verdict
    badge, name = Text(f" {verdict.value.upper()} ", f"bold reverse {COLOURS[verdict]}"), pen.text(day.name, "bold")
    faults = sum(len(one.faults) for one in rounds)
    about = (
        f"seed {day.seed}, {_of(len(rounds), len(day.rounds), 'round')}, "
        f"{_of(faults, faults_of(day.rounds), 'fault')}, "
        f"{seconds_in_words(score.clock.wall_s)} since the first steps"
    )
    pen.gap()
    pen.row([(badge, badge.cell_len), (name, name.cell_len + 1)], pen.text(about, "dim"), indent=0)
    for sentence in why:
        sentence = sentence.partition(f": {score.problems[0]}")[0] if score.problems else sentence
        pen.row([], pen.text(f"{sentence}.", "bold"), indent=1, most=3)
    if score.clock.wall_s:
        parts = [(part, getattr(score.clock, f"{part}_s")) for part in ("productive", *_LOSSES)]
        shares = ", ".join(f"{part} {at_s / score.clock.wall_s:.1%}" for part, at_s in parts if at_s)
        pen.row([(pen.text("time", "dim"), _LABEL)], pen.text(shares))
    ended = ", ".join(f"{many} {outcome}" for outcome, many in score.outcomes.items() if many)
    pen.row([(pen.text("faults", "dim"), _LABEL)], pen.text(ended or "none came"))
    looked = to_look_at(rounds)
    for one in looked[:_MOST]:
        names = ", ".join(one.faults[:_MOST]) + (f" and {len(one.faults) - _MOST} more" if one.faults[_MOST:] else "")
        words = f"{one.outcome}: {one.reason}" if one.outcome else f"round {one.rounds[0]}: {one.reason}"
        pen.row([(pen.text(names or "round", "dim"), _LABEL)], pen.text(words), most=2)
    pen.gap()
    pen.long_line(pen.text("Report", "dim"), _LABEL, str(Path(folder) / "report.html"))
    pen.long_line(pen.text("More", "dim"), _LABEL, str(Path(folder) / "report.md"))
    if looked:
        pen.long_line(pen.text("Again", "dim"), _LABEL, again_in_words(day, folder, looked[0].rounds[0]))
    pen.gap()


def _of(many: int, planned: int, noun: str) -> str:
    return f"{many} of {planned} {noun}{'' if planned == 1 else 's'}"


_LOSSES = ("lost", "checkpoint", "stalled", "down")
