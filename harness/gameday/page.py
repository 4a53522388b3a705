"""A game day on one HTML page: the verdict, the use of time, every fault on a strip of the day, and the rounds that the
reader should look at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchaos.harness.gameday.clock import Clock
from torchaos.harness.gameday.day import Day
from torchaos.harness.gameday.draw import Drawn
from torchaos.harness.gameday.outcomes import FaultOutcome, Outcome
from torchaos.harness.gameday.report import again_in_words, bound_gauges, faults_of, score_rows
from torchaos.harness.gameday.score import RoundScore, Score
from torchaos.harness.gameday.verdict import verdict_of
from torchaos.harness.record.result import Case
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.words import seconds_in_words
from torchaos.harness.telling.html.page import render

_PARTS = ("productive", "lost", "checkpoint", "stalled", "down")  # fields of Clock, in the order of the bar
_LANE, _WIDTH = 22, 1000  # width of the strip, in units of its picture


def text(day: Day, folder: Path, rounds: Sequence[RoundScore], score: Score, cases: Sequence[Case]) -> str:
    """The HTML of a game day's page. `folder`: the folder of the game day; links to the reports of its rounds are
    relative to it."""
    code, why = verdict_of(cases)
    found = [*_faults(day, rounds)]
    return render("day.html", {}, {
        "name": day.name, "seed": day.seed, "verdict": code.verdict.value, "why": why,
        "happened": _happened(score, len(rounds)),
        "score": score_rows(score), "bounds": bound_gauges(cases),
        "clock": _shares(score.clock), "strip": _strip(found),
        "kinds": sorted(score.kinds.items()), "seen": [one.value for one in Outcome if score.outcomes.get(one.value)],
        "parts": {part.replace("_", " "): spread for part, spread in score.parts.items() if spread},
        "lost": score.lost_steps, "rounds": [_round(day, scored, folder) for scored in rounds], "faults": found,
        "planned": (len(day.rounds), faults_of(day.rounds)), "without": day.without,
    })  # fmt: skip


def _happened(score: Score, rounds: int) -> str:
    came = [f"{many} {name}" for name, many in score.outcomes.items() if many]
    faults, clock = sum(score.outcomes.values()), score.clock
    return (
        f"{rounds} {'round' if rounds == 1 else 'rounds'} with {faults} {'fault' if faults == 1 else 'faults'}"
        f"{': ' if came else ''}{', '.join(came)}."
    ) + ("" if clock.ettr is None else f" Training got on in {clock.ettr:.1%} of {seconds_in_words(clock.wall_s)}.")


def _shares(clock: Clock) -> list[dict[str, Any]]:
    """The classes of wall-clock time, each with its start in the bar, in percent."""
    assert {item.name for item in fields(Clock)} == {f"{part}_s" for part in _PARTS}
    left, found = 0.0, []
    for part in _PARTS:
        seconds: float = getattr(clock, f"{part}_s")
        width = 100 * seconds / clock.wall_s if clock.wall_s else 0.0
        found.append({"part": part, "words": seconds_in_words(seconds), "left": left, "width": width})
        left += width
    return found


def _faults(day: Day, rounds: Sequence[RoundScore]) -> Iterator[dict[str, Any]]:
    drawn: Mapping[str, tuple[int, Drawn]] = {
        fault.id: (game_round.number, fault) for game_round in day.rounds for fault in game_round.faults
    }
    for scored in rounds:
        for fault in scored.faults:
            if fault.id in drawn:
                yield _fault(*drawn[fault.id], fault)


def _fault(number: int, drawn: Drawn, came: FaultOutcome) -> dict[str, Any]:
    return {
        "id": drawn.id, "round": number, "at_s": drawn.at_s, "at": seconds_in_words(drawn.at_s),
        "inject": came.inject, "cause": drawn.risk.cause, "outcome": came.outcome.value,
        "mark": came.outcome.name.lower(), "reason": came.reason, "lost_steps": came.lost_steps,
        "caught_up": came.parts.get("caught_up"),
    }  # fmt: skip


def _strip(faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A lane for each kind of fault, with a mark at the planned time of each fault. A fault never lands before its
    planned time."""
    lanes = {inject: row for row, inject in enumerate(sorted({fault["inject"] for fault in faults}))}
    end_s = max((fault["at_s"] for fault in faults), default=0.0) or 1.0
    marks = [
        {
            "x": round(_WIDTH * fault["at_s"] / end_s, 1), "y": lanes[fault["inject"]] * _LANE + _LANE / 2,
            "mark": fault["mark"], "words": f"{fault['id']} at {fault['at']}: {fault['outcome']}. {fault['reason']}",
        }
        for fault in faults
    ]  # fmt: skip
    return {"lanes": lanes, "lane": _LANE, "width": _WIDTH, "marks": marks, "end": seconds_in_words(end_s)}


def _round(day: Day, scored: RoundScore, folder: Path) -> dict[str, Any]:
    report = RunDir(Path(scored.run_dir)).report
    return {
        "number": scored.number, "verdict": scored.verdict,
        "reason": "" if scored.verdict == "passed" else scored.reason,
        "clock": _shares(scored.clock), "ettr": scored.clock.ettr, "wall": seconds_in_words(scored.clock.wall_s),
        "faults": len(scored.faults),
        "link": os.path.relpath(report, folder) if scored.run_dir and report.is_file() else "",
        "again": again_in_words(day, str(folder), scored.number),
    }  # fmt: skip
