"""A game day as a Markdown page: the verdict and its reason, the score, and the outcomes for each kind of fault."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.gameday.day import Day
from torchaos.harness.gameday.draw import Round
from torchaos.harness.gameday.outcomes import Outcome
from torchaos.harness.gameday.score import RoundScore, Score, Spread
from torchaos.harness.gameday.verdict import AT_LEAST, verdict_of
from torchaos.harness.record.result import Case
from torchaos.harness.record.words import seconds_in_words
from torchaos.harness.telling.terminal.headline import Gauge
from torchaos.harness.telling.terminal.text import name_in_words, value_in_words


def page(day: Day, folder: str, rounds: Sequence[RoundScore], score: Score, cases: Sequence[Case]) -> str:
    code, why = verdict_of(cases)
    parts = [
        [f"# {day.name}: {code.verdict.value}", "", *(f"- {text}" for text in why)],
        _bounds(cases),
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
    return "\n".join([f"# {day.name}: {many} faults in {len(day.rounds)} rounds", "", *head, *rows, *_without(day), ""])


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


def bound_gauges(cases: Sequence[Case]) -> list[Gauge]:
    """Each bound beside its figure, with the verdict of its case. The bar is full at the bound."""
    found = []
    for case in cases:
        for name, bound in case.bound.items():
            value = case.measured.get(name)
            side = "at least" if name in AT_LEAST else "at most"
            asked = f"{side} {value_in_words(name, bound, case.seconds)}"
            share = None if value is None else min(1.0, value / bound) if bound else float(value > 0)
            words = value_in_words(name, value, case.seconds)
            found.append(Gauge(name_in_words(name), words, asked, case.verdict.value, share))
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
    rows = [_spread(part.replace("_", " "), found) for part, found in score.parts.items() if found]
    if lost := score.lost_steps:
        rows.append(f"| lost steps | {lost.count} | {lost.mean:.1f} | {lost.median:g} | {lost.p90:g} | {lost.most:g} |")
    head = ["", "| since the fault | times | mean | median | p90 | most |", "|---|---|---|---|---|---|"]
    return [*head, *rows] if rows else []


def _spread(name: str, found: Spread) -> str:
    values = " | ".join(seconds_in_words(value) for value in (found.mean, found.median, found.p90, found.most))
    return f"| {name} | {found.count} | {values} |"


def again_in_words(day: Day, folder: str, number: int) -> str:
    """The command that runs a round again, unchanged."""
    scenario = f"{folder}/rounds/{number:03d}/scenario.yaml"
    consent = [word for name in day.consent for word in ("--consent", name)]
    return shlex.join(["torchaos", "run", scenario, "--seed", str(day.seed), *consent])


@dataclass(frozen=True)
class ToLookAt:
    """What ended otherwise than by a simple recovery, for one reason. `outcome` and `faults` are empty for a round
    whose reason no fault has."""

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
    """What a reader should look at, each reason once. First comes what decided the verdict of the day: the worst
    outcome of a round with the worst verdict."""
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
        f"- {_rounds(one.rounds)}{''.join(f', {name}' for name in one.faults)}: "
        f"{f'**{one.outcome}**: ' if one.outcome else ''}{one.reason}"
        for one in found
    ]
    numbers = sorted({number for one in found for number in one.rounds})
    lines += [f"- round {number} again: `{again_in_words(day, folder, number)}`" for number in numbers]
    return ["", "## To look at", "", *lines] if lines else []


def _rounds(numbers: Sequence[int]) -> str:
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _end(day: Day, folder: str, rounds: Sequence[RoundScore]) -> list[str]:
    many, begun = faults_of(day.rounds), sum(len(scored.faults) for scored in rounds)
    late = f" Not started: {many - begun} of {many} faults, which could not have ended in time." if begun < many else ""
    return ["", f"Seed {day.seed}, {len(rounds)} of {len(day.rounds)} rounds.{late} The plan: {folder}/day.json"]


def _without(day: Day) -> list[str]:
    if not day.without:
        return []
    lines = [f"- {cause} ({weight:g}): {why}" for cause, weight, why in day.without]
    return ["", "## Causes of the preset that can't be injected here", "", *lines]


def faults_of(rounds: Sequence[Round]) -> int:
    return sum(len(one.faults) for one in rounds)
