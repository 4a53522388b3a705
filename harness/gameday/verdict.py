"""The cases of a game day: for its faults, for each bound, and for its rollback. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchaos.harness.gameday.grammar import Bounds
from torchaos.harness.gameday.outcomes import Outcome
from torchaos.harness.gameday.score import RoundScore, Score
from torchaos.harness.narrowing.child import JUDGED
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict

AT_LEAST = ("ettr", "goodput")  # all other bounds are upper bounds
_SECONDS = ("mttr", "mttr_p90")


def cases_of(
    score: Score, bounds: Bounds, rounds: Sequence[RoundScore], cut_short: str = "", planned: int = 0
) -> list[Case]:
    """The cases of a game day. `cut_short`: the reason if the day ended early. `planned`: the number of drawn
    faults."""
    return [_faults(score, bounds, rounds, cut_short, planned), *_bounds(score, bounds), _rollback(rounds)]


def verdict_of(cases: Sequence[Case]) -> tuple[ExitCode, list[str]]:
    """The exit code of a game day, and its reason in sentences."""
    bad = {verdict: [case.reason for case in cases if case.verdict is verdict] for verdict in Verdict}
    if bad[Verdict.ERROR]:
        return ExitCode.ROLLBACK, [*bad[Verdict.ERROR], *bad[Verdict.FAILED]]
    if bad[Verdict.FAILED]:
        return ExitCode.FAILED, bad[Verdict.FAILED]
    if bad[Verdict.INCONCLUSIVE]:
        return ExitCode.INCONCLUSIVE, bad[Verdict.INCONCLUSIVE]
    return ExitCode.PASSED, [case.reason for case in cases if case.kind == "faults"]


def result_of(name: str, seed: int, folder: str, started: str, wall_s: float, cases: Sequence[Case]) -> Result:
    """The whole game day as one result, for JUnit. `started`: ISO 8601, UTC."""
    code, why = verdict_of(cases)
    return Result(name, "", seed, code.verdict, code, "; ".join(why), folder, started, wall_s, cases=tuple(cases))


def not_finished(result: Result) -> Result:
    """The cases of a day that is not over. Each is an error, so that a gate which reads them too early stays closed."""
    cases = [replace(case, verdict=Verdict.ERROR, reason="not finished", measured={}) for case in result.cases]
    return replace(
        result, verdict=Verdict.ERROR, exit_code=ExitCode.INTERNAL, reason="not finished", cases=tuple(cases)
    )


def _faults(score: Score, bounds: Bounds, rounds: Sequence[RoundScore], cut_short: str, planned: int) -> Case:
    faults, doubt = sum(score.outcomes.values()), ""
    unproved = score.outcomes.get(Outcome.UNPROVED.value, 0)
    if cut_short:
        doubt = f"the game day was cut short: {cut_short}"
    elif not faults or not score.clock.wall_s:
        doubt = "no fault landed" if score.clock.wall_s else "no step was seen"
    elif unproved > bounds.unproved * faults:
        doubt = f"{unproved} of {faults} faults did not land, or nothing shows that the fault was felt"
    elif len(score.unjudged) > bounds.unproved * len(rounds):
        are = "round is" if len(rounds) == 1 else "rounds are"
        doubt = f"{len(score.unjudged)} of {len(rounds)} {are} no evidence: {'; '.join(score.unjudged[:3])}"
    verdict = Verdict.INCONCLUSIVE if doubt else Verdict.PASSED
    felt = f"{faults - unproved} of {faults} faults landed and were felt"
    if faults < planned:
        felt = f"{faults} of {planned} faults were started; {faults - unproved} landed and were felt"
    reason = doubt or felt
    return Case("faults", "faults", verdict, reason, score.outcomes)


def _rollback(rounds: Sequence[RoundScore]) -> Case:
    left = [scored.number for scored in rounds if scored.exit_code == ExitCode.ROLLBACK]
    unjudged = [scored.number for scored in rounds if scored.exit_code not in JUDGED]
    if left:
        verdict, why = Verdict.ERROR, f"something could not be undone in round {left[0]}; see `torchaos recover`"
    elif unjudged:
        verdict = Verdict.INCONCLUSIVE
        why = f"it is not known whether round {unjudged[0]} undid everything; see `torchaos status`"
    else:
        verdict, why = Verdict.PASSED, "all rounds undid their changes"
    return Case("rollback", "rollback", verdict, why)


def _bounds(score: Score, bounds: Bounds) -> Iterator[Case]:
    for name, value in _measured(score).items():
        bound, words = getattr(bounds, name), name.replace("_", " ")
        if bound is None:
            continue
        seconds = (name,) if name in _SECONDS else ()
        if value is None:
            reason = f"nothing was seen from which {words} could be computed"
            yield Case(name, "assertion", Verdict.INCONCLUSIVE, reason, {}, {name: bound}, seconds)
            continue
        holds = value >= bound if name in AT_LEAST else value <= bound
        is_to_be = f"{'at least' if name in AT_LEAST else 'at most'} {bound:g}"
        reason = f"{words} is {value:.4g}, and must be {is_to_be}"
        if name == "damaged" and not holds:
            have = "round has" if score.rounds == 1 else "rounds have"
            reason = f"{score.damaged} of {score.rounds} {have} a failed assertion, and damaged is at most {bound:g}"
            more = len(score.problems) - 1
            reason += f": {score.problems[0]}{f'; and {more} more' if more else ''}"
        verdict = Verdict.PASSED if holds else Verdict.FAILED
        yield Case(name, "assertion", verdict, reason, {name: value}, {name: bound}, seconds)


def _measured(score: Score) -> dict[str, float | None]:
    caught, lost, clock = score.parts.get("caught_up"), score.lost_steps, score.clock
    return {
        "ettr": clock.ettr,
        "goodput": clock.goodput,
        "mttr": caught.mean if caught else None,
        "mttr_p90": caught.p90 if caught else None,
        "lost_steps": None if score.lost_unknown else lost.most if lost else 0,
        "checkpoint_share": clock.checkpoint_s / clock.wall_s if clock.wall_s else None,
        "stuck": score.outcomes.get(Outcome.STUCK.value, 0),
        "damaged": score.damaged,
        "lost_work": score.outcomes.get(Outcome.LOST_WORK.value, 0),
    }
