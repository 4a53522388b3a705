"""A game day as a few lines on a terminal, a Markdown page, and one HTML page: the verdict and its reason, the use of
time, the score, every fault on a strip of the day, and the outcomes for each kind of fault."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from torchaos.harness.gameday.day import Day
from torchaos.harness.gameday.fault_outcomes import Clock, FaultOutcome, Outcome
from torchaos.harness.gameday.fault_schedule import Drawn, Round
from torchaos.harness.gameday.score import AT_LEAST, RoundScore, Score, Spread, verdict_of
from torchaos.harness.record.plan import counted, numbered, seconds_in_words
from torchaos.harness.record.result import Case, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.html.page import render
from torchaos.harness.reporting.terminal.headline import Gauge
from torchaos.harness.reporting.terminal.text import COLOURS, Pen, name_in_words, value_in_words


def page(day: Day, folder: str, rounds: Sequence[RoundScore], score: Score, cases: Sequence[Case]) -> str:
    code, why = verdict_of(cases)
    parts = [
        [f"# {day.name}: {code.verdict.value}", "", *(f"- {text}" for text in why)],
        _bounds(cases),
        ["", note] if (note := caveat(score)) else [],
        _score(score),
        _kinds(score),
        _parts(score),
        _to_look_at(day, rounds, folder),
        _without(day),
        _end(day, folder, rounds),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def drawn(day: Day) -> str:
    rows = [
        f"| {fault.id} | {each.number} | {seconds_in_words(fault.at_s)} | {fault.risk.inject} | {fault.risk.cause} |"
        for each in day.rounds
        for fault in each.faults
    ]
    head = ["| fault | round | at | injector | stands for |", "|---|---|---|---|---|"]
    many = sum(len(each.faults) for each in day.rounds)
    return "\n".join(
        [
            f"# {day.name}: {counted(many, 'fault')} in {counted(len(day.rounds), 'round')}",
            "",
            "`at` counts from the start of the day, and so includes the start of the job. A fault that is due before "
            "the job's first steps comes right after them.",
            "",
            *head,
            *rows,
            *_without(day),
            "",
        ]
    )


def _share(share: float | None) -> str:
    return "not seen" if share is None else f"{share:.1%}"


def score_rows(score: Score) -> list[tuple[str, str]]:
    """A row for each figure of the score, with its name in words."""
    clock, wall = score.clock, score.clock.wall_s or 1.0
    return [
        ("effective training time ratio (ETTR)", _share(clock.ettr)),
        ("expected from interval, restart and MTBF", _share(score.expected_ettr)),
        ("runtime goodput", _share(clock.goodput)),
        ("time since the first step of each round", seconds_in_words(clock.wall_s)),
        ("lost: done again", f"{seconds_in_words(clock.lost_s)} ({clock.lost_s / wall:.1%})"),
        ("down: between the attempts", f"{seconds_in_words(clock.down_s)} ({clock.down_s / wall:.1%})"),
        ("stalled", f"{seconds_in_words(clock.stalled_s)} ({clock.stalled_s / wall:.1%})"),
        ("stood still for checkpoints", f"{seconds_in_words(clock.checkpoint_s)} ({clock.checkpoint_s / wall:.1%})"),
        ("invalid training time (recovering or saving)", seconds_in_words(score.invalid_s)),
        ("lost GPU hours", f"{score.gpu_hours_lost:.3g}"),
        ("mean time between interruptions with a restart", seconds_in_words(score.mtbf_s)),
        ("checkpoint interval in use", seconds_in_words(score.interval_s)),
        ("best checkpoint interval for these interruptions (Young, Daly)", seconds_in_words(score.best_interval_s)),
    ]


_SHARES = (*AT_LEAST, "checkpoint_share")
_NAMES = {"ettr": "ettr (training time)", "mttr": "mttr (mean time to recover)"}


def bound_gauges(cases: Sequence[Case]) -> list[Gauge]:
    """Each bound with its figure and the verdict of its case. If the figure must be large, the bar is the figure, with
    a mark at the bound. Otherwise a full bar means that the figure is at its bound."""
    found = []
    for case in cases:
        for name, bound in case.bound.items():
            value, large = case.measured.get(name), name in AT_LEAST
            words = _share if name in _SHARES else partial(value_in_words, name, seconds=case.seconds)
            asked = f"{'at least' if large else 'at most'} {words(bound)}"
            share = min(1.0, value / (1.0 if large else bound)) if value and bound else 1.0 if value else None
            shown = _NAMES.get(name, name_in_words(name))
            found.append(Gauge(shown, words(value), asked, case.verdict.value, share, bound if large else None))
    return found


def _bounds(cases: Sequence[Case]) -> list[str]:
    rows = [f"| {one.name} | {one.value} | {one.bound} | {one.state} |" for one in bound_gauges(cases)]
    return ["", "| bound | measured | asked | |", "|---|---|---|---|", *rows] if rows else []


def _score(score: Score) -> list[str]:
    rows = score_rows(score)
    return ["", "| score | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _kinds(score: Score) -> list[str]:
    seen = [one.value for one in Outcome if score.outcomes.get(one.value)]
    rows = [
        f"| {inject} | {' | '.join(str(found.get(name, 0)) for name in seen)} |"
        for inject, found in sorted(score.kinds.items())
    ]
    total = f"| all | {' | '.join(str(score.outcomes[name]) for name in seen)} |"
    return ["", f"| fault | {' | '.join(seen)} |", "|---" * (len(seen) + 1) + "|", *rows, total] if seen else []


def _parts(score: Score) -> list[str]:
    head = ["", "| since the fault | times | mean | median | p90 | most |", "|---|---|---|---|---|---|"]
    rows = [f"| {' | '.join(row)} |" for row in spread_rows(score)]
    return [*head, *rows] if rows else []


def spread_rows(score: Score) -> list[list[str]]:
    """A row for each part of the recoveries: its name, how often it was seen, and its figures. Empty text for a figure
    that needs more values."""

    def row(name: str, found: Spread, words: Callable[[float], str]) -> list[str]:
        return [name, str(found.count), *("" if one is None else words(one) for one in found.figures())]

    rows = [row(part.replace("_", " "), found, seconds_in_words) for part, found in score.parts.items() if found]
    if lost := score.lost_steps:
        rows.append(row("steps done again", lost, lambda steps: f"{round(steps, 1):g}"))
    return rows


_FEW = 5  # faults


def caveat(score: Score) -> str:
    """Says that the figures of the day come from a few faults. Empty if there are enough."""
    faults = sum(score.outcomes.values())
    if not 0 < faults < _FEW:
        return ""
    day = f"{counted(faults, 'fault')} in {seconds_in_words(score.clock.wall_s)}"
    return f"{day}: this is an example and no statistic, and another seed gives other shares and times"


def again_in_words(day: Day, folder: str, number: int) -> str:
    """The command that runs a round again, unchanged."""
    scenario = f"{folder}/rounds/{number:03d}/scenario.yaml"
    consent = [word for name in day.consent for word in ("--consent", name)]
    return shlex.join(["torchaos", "run", scenario, "--seed", str(day.seed), *consent])


@dataclass(frozen=True)
class ToLookAt:
    """The faults and rounds that did not end with a simple recovery, for the same reason. `outcome` and `faults` are
    empty if it is the reason of a round, and of none of its faults."""

    outcome: str
    reason: str
    faults: tuple[str, ...]
    rounds: tuple[int, ...]


_WORST_FIRST = (
    "", Outcome.DAMAGED, Outcome.STUCK, Outcome.LOST_WORK, Outcome.OTHERWISE, Outcome.DEGRADED, Outcome.UNPROVED,
    Outcome.UNJUDGED,
)  # fmt: skip
_ROUNDS = ("error", "failed", "inconclusive", "passed")  # verdicts


def to_look_at(rounds: Sequence[RoundScore]) -> list[ToLookAt]:
    """What a reader should look at, each reason once. First comes the reason that decided the verdict of the day: the
    worst outcome of a round with the worst verdict."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for scored in rounds:
        bad = [fault for fault in scored.faults if fault.outcome is not Outcome.RECOVERED]
        for fault in bad:
            found.setdefault((fault.outcome.value, fault.reason), []).append((fault.id, scored.number))
        known = any(fault.reason and (fault.reason in scored.reason or scored.reason in fault.reason) for fault in bad)
        if scored.verdict != "passed" and not known:
            found.setdefault(("", f"{scored.verdict}: {scored.reason}"), []).append(("", scored.number))
    verdicts = {scored.number: _ROUNDS.index(scored.verdict) for scored in rounds}
    told = [
        ToLookAt(outcome, reason, tuple(name for name, _ in each if name), tuple(dict.fromkeys(n for _, n in each)))
        for (outcome, reason), each in found.items()
    ]
    return sorted(told, key=lambda one: (min(verdicts[n] for n in one.rounds), _WORST_FIRST.index(one.outcome)))


def _to_look_at(day: Day, rounds: Sequence[RoundScore], folder: str) -> list[str]:
    """A line for each reason, with its faults and rounds, then the commands that run these rounds again."""
    found = to_look_at(rounds)
    lines = [
        f"- {numbered('round', one.rounds)}{''.join(f', {name}' for name in one.faults)}: "
        f"{f'**{one.outcome}**: ' if one.outcome else ''}{one.reason}"
        for one in found
    ]
    numbers = sorted({number for one in found for number in one.rounds})
    lines += [f"- round {number} again: `{again_in_words(day, folder, number)}`" for number in numbers]
    return ["", "## To look at", "", *lines] if lines else []


def _end(day: Day, folder: str, rounds: Sequence[RoundScore]) -> list[str]:
    begun, planned = sum(len(scored.faults) for scored in rounds), faults_of(day.rounds)
    came = f"{_of(len(rounds), len(day.rounds), 'round')}, {_of(begun, planned, 'fault')}"
    return ["", f"Seed {day.seed}, {came}. The plan: {folder}/day.json"]


def _without(day: Day) -> list[str]:
    if not day.without:
        return []
    lines = [f"- {cause} ({weight:g}): {why}" for cause, weight, why in day.without]
    return ["", "## Causes of the preset that can't be injected here", "", *lines]


def faults_of(rounds: Sequence[Round]) -> int:
    return sum(len(one.faults) for one in rounds)


_LABEL, _MOST = 10, 3


def show(
    day: Day, folder: str, rounds: Sequence[RoundScore], score: Score, cases: Sequence[Case], console: Console
) -> None:
    pen = Pen(console)
    code, why = verdict_of(cases)
    verdict = code.verdict
    faults = sum(len(one.faults) for one in rounds)
    about = (
        f"seed {day.seed}, {_of(len(rounds), len(day.rounds), 'round')}, "
        f"{faults_in_words(day, faults, verdict)}, "
        f"{seconds_in_words(score.clock.wall_s)} since the first steps"
    )
    pen.banner(verdict.value.upper(), COLOURS[verdict], day.name, about)
    for sentence in why:
        sentence = sentence.partition(f": {score.problems[0]}")[0] if score.problems else sentence
        pen.row([], pen.text(f"{sentence}.", "bold"), indent=1, most=3)
    if score.clock.wall_s:
        parts = [(part, getattr(score.clock, f"{part}_s")) for part in ("productive", *_LOSSES)]
        shares = ", ".join(f"{part} {at_s / score.clock.wall_s:.1%}" for part, at_s in parts if at_s)
        pen.row([(pen.text("time", "dim"), _LABEL)], pen.text(shares))
    ended = ", ".join(f"{many} {outcome}" for outcome, many in score.outcomes.items() if many)
    pen.row([(pen.text("faults", "dim"), _LABEL)], pen.text(ended or "none came"))
    if note := caveat(score):
        pen.row([(pen.text("note", "yellow"), _LABEL)], pen.text(note))
    looked = to_look_at(rounds)
    for one in looked[:_MOST]:
        names = ", ".join(one.faults[:_MOST]) + (f" and {len(one.faults) - _MOST} more" if one.faults[_MOST:] else "")
        words = f"{one.outcome}: {one.reason}" if one.outcome else f"round {one.rounds[0]}: {one.reason}"
        pen.row([], pen.text(f"{names}: {words}" if names else words), most=2)
    pen.gap()
    pen.long_line(pen.text("Report", "dim"), _LABEL, str(Path(folder) / "report.html"))
    if looked:
        pen.long_line(pen.text("Reproduce", "dim"), _LABEL, again_in_words(day, folder, looked[0].rounds[0]))
    pen.gap()


def faults_in_words(day: Day, begun: int, verdict: Verdict) -> str:
    """How many faults were started. If the day passed, also which faults were not."""
    return counted(begun, "fault") if verdict is Verdict.PASSED else _of(begun, faults_of(day.rounds), "fault")


def _of(many: int, planned: int, noun: str) -> str:
    return f"{many} of {planned} {noun}{'' if planned == 1 else 's'}"


_LOSSES = ("lost", "checkpoint", "stalled", "down")


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
        "parts": spread_rows(score), "caveat": caveat(score),
        "rounds": [_round(day, scored, folder) for scored in rounds], "faults": found,
        "came": f"{_of(len(rounds), len(day.rounds), 'round')}, {faults_in_words(day, len(found), code.verdict)}",
        "without": day.without,
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
