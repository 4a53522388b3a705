"""The score of a game day, which is the sum of its rounds; and the cases of its verdict: one for its faults, one for
each bound, and one for its rollback. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from torchaos.harness.analysis.checkpointing.save_schedule import standstill
from torchaos.harness.analysis.recovery_times import PARTS, interruptions, invalid_s
from torchaos.harness.gameday.day_grammar import Bounds
from torchaos.harness.gameday.fault_outcomes import (
    Clock,
    FaultOutcome,
    Outcome,
    clock_of,
    outcomes_of,
    saves_under_fault,
)
from torchaos.harness.minimize.scenario_shrink import JUDGED
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.release.repeats import p90


@dataclass(frozen=True)
class RoundScore:
    """The score of a round. Nothing else of a judged round stays in memory."""

    number: int
    verdict: str
    reason: str
    exit_code: int
    run_dir: str
    world_size: int = 0
    clock: Clock = field(default_factory=Clock)
    faults: tuple[FaultOutcome, ...] = ()
    saves_s: tuple[float, ...] = ()  # seconds that training stood still, for each checkpoint without a fault in it
    intervals_s: tuple[float, ...] = ()  # seconds of training between two checkpoints
    failed: tuple[str, ...] = ()  # assertions that were inconclusive, each with its reason
    passed: tuple[str, ...] = ()  # assertions, by name
    untold: tuple[str, ...] = ()  # inconclusive cases, by name
    restarted: bool = True  # whether the job started again after a fault
    decided_by: str = ""  # from the result of the round
    restarts_s: tuple[float, ...] = ()  # of each interruption with a restart: seconds until its first step
    invalid_s: float = 0.0  # seconds in which training was interrupted, or stood still for a checkpoint

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def score_round(number: int, run: Record, result: Result) -> RoundScore:
    wrong = tuple(f"{case.name}: {case.reason}" for case in result.assertions(Verdict.FAILED))
    saves = _saves(run)
    interrupted = interruptions(run, result.recoveries)
    world = next(
        (attempt.world_size for attempt in run.history.attempts if attempt.world_size), run.plan.job.world_size
    )
    return RoundScore(
        number, result.verdict.value, result.reason, int(result.exit_code), result.run_dir, world, clock_of(run),
        tuple(outcomes_of(run, result)), tuple(blocked for _, _, blocked in saves if blocked is not None),
        tuple(b - a for (one, a, _), (other, b, _) in pairwise(saves) if one == other), wrong,
        tuple(case.name for case in result.assertions(Verdict.PASSED)),
        tuple(case.name for case in result.cases if case.verdict is Verdict.INCONCLUSIVE),
        len(run.history.attempts) > 1, result.decided_by,
        tuple(at for one in interrupted if (at := one.restarted_after_s) is not None), invalid_s(run, interrupted),
    )  # fmt: skip


def _saves(run: Record) -> list[tuple[int, float, float | None]]:
    """For each step after which a file was written: its attempt, when the save began, and the seconds that training
    stood still (None if a fault was on during the save)."""
    blocked, hit = standstill(run.history).blocked, saves_under_fault(run)
    begun: dict[tuple[int, int], float] = {}
    for save in run.history.saves:
        key = (save.attempt, save.local_step)
        begun[key] = min(begun.get(key, save.begun_s), save.begun_s)
    return [(key[0], at_s, None if key in hit else blocked.get(key, 0.0)) for key, at_s in sorted(begun.items())]


@dataclass(frozen=True)
class Spread:
    """The distribution of a value that was measured several times."""

    count: int
    mean: float
    median: float
    p90: float  # nearest rank
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(len(values), fmean(values), median(values), p90(values), max(values))

    def figures(self) -> tuple[float | None, ...]:
        """Mean, median, p90 and most. None for a figure that would be the same as another, because there are too few
        values."""
        few = (1, 3, 10, 2)  # the number of values that each figure needs
        figures = (self.mean, self.median, self.p90, self.most)
        return tuple(one if self.count >= least else None for one, least in zip(figures, few, strict=True))


@dataclass(frozen=True)
class Score:
    rounds: int
    clock: Clock
    outcomes: Mapping[str, int]  # number of faults by outcome
    kinds: Mapping[str, Mapping[str, int]]  # number of faults by injector and outcome
    parts: Mapping[str, Spread | None]  # of the recoveries, in seconds since the fault
    lost_steps: Spread | None
    lost_unknown: int  # recoveries whose number of repeated steps is not known
    checkpoint_s: Spread | None  # seconds that training stood still for a checkpoint
    gpu_hours_lost: float
    mtbf_s: float | None  # mean seconds between two interruptions with a restart
    interval_s: float | None  # median seconds of training between two checkpoints
    best_interval_s: float | None
    expected_ettr: float | None
    invalid_s: float
    problems: tuple[str, ...] = ()  # each failed assertion of each round
    damaged: int = 0  # rounds with a failed assertion
    unjudged: tuple[str, ...] = field(default=())  # rounds whose verdict is no evidence


def total(rounds: Sequence[RoundScore]) -> Score:
    faults = [fault for scored in rounds for fault in scored.faults]
    clock = sum((scored.clock for scored in rounds), Clock())
    restarts_s = [at for scored in rounds for at in scored.restarts_s]
    lost = [one.lost_steps for one in faults if one.lost_steps is not None and one.parts.get("first_step")]
    parts = {part: Spread.of([at for one in faults if (at := one.parts.get(part)) is not None]) for part in PARTS}
    saves = Spread.of([blocked for scored in rounds for blocked in scored.saves_s])
    intervals = [interval for scored in rounds for interval in scored.intervals_s]
    mtbf = clock.wall_s / len(restarts_s) if restarts_s else None
    interval, write = median(intervals) if intervals else None, saves.mean if saves else None
    back = Spread.of(restarts_s)
    kinds: dict[str, Counter[str]] = {}
    for fault in faults:
        kinds.setdefault(fault.inject, Counter())[fault.outcome.value] += 1
    return Score(
        rounds=len(rounds),
        clock=clock,
        outcomes=dict(Counter(fault.outcome.value for fault in faults)),
        kinds={inject: dict(found) for inject, found in kinds.items()},
        parts=parts,
        lost_unknown=sum(one.lost_steps is None and one.parts.get("first_step") is not None for one in faults),
        lost_steps=Spread.of(lost),
        checkpoint_s=saves,
        gpu_hours_lost=sum((each.clock.wall_s - each.clock.productive_s) * each.world_size for each in rounds) / 3600,
        mtbf_s=mtbf,
        interval_s=interval,
        best_interval_s=best_interval_s(write, mtbf),
        expected_ettr=expected_ettr(mtbf, back.mean if back else None, interval, write),
        invalid_s=sum(scored.invalid_s for scored in rounds),
        problems=tuple(f"round {scored.number}: {text.rstrip('.')}" for scored in rounds for text in scored.failed),
        damaged=sum(bool(scored.failed) for scored in rounds),
        unjudged=tuple(f"round {each.number}: {each.reason}" for each in rounds if _proves_nothing(each, rounds)),
    )  # fmt: skip


def settled(rounds: Sequence[RoundScore]) -> list[RoundScore]:
    """The same rounds; in a round that proves nothing, no fault counts as recovered."""
    return [_without_recoveries(one) if _proves_nothing(one, rounds) else one for one in rounds]


def _without_recoveries(scored: RoundScore) -> RoundScore:
    why = f"its round is no evidence: {scored.reason}"
    faults = [
        replace(fault, outcome=Outcome.UNJUDGED, reason=why) if fault.outcome is Outcome.RECOVERED else fault
        for fault in scored.faults
    ]
    return replace(scored, faults=tuple(faults))


def _proves_nothing(scored: RoundScore, rounds: Sequence[RoundScore]) -> bool:
    """Whether a round proves nothing. If no fault restarted the job in it, it has no step that was done twice, and so
    nothing to compare. Such a round is still evidence if other rounds passed the assertions that lacked data in it."""
    if scored.verdict not in ("inconclusive", "error"):
        return False
    told = {name for other in rounds for name in other.passed}
    by_assertions = scored.verdict == "inconclusive" and scored.decided_by in scored.untold
    return not by_assertions or scored.restarted or not told.issuperset(scored.untold)


def best_interval_s(write_s: float | None, mtbf_s: float | None) -> float | None:
    """The best time in seconds between two checkpoints: sqrt(2 * write * MTBF) (Young 1974; Daly 2006, first order)."""
    return math.sqrt(2 * write_s * mtbf_s) if write_s is not None and mtbf_s is not None else None


def expected_ettr(
    mtbf_s: float | None, restart_s: float | None, interval_s: float | None, write_s: float | None
) -> float | None:
    """E[ETTR] = (1 - (restart + interval / 2) / MTBF) / (1 + write / interval) (arXiv 2410.21680, without a queue).
    `restart_s`: seconds from the fault to the first step."""
    if mtbf_s is None or restart_s is None or not interval_s or write_s is None:
        return None
    return max(0.0, 1 - (restart_s + interval_s / 2) / mtbf_s) / (1 + write_s / interval_s)


_NAMED = 3  # the most dropped faults that are named
AT_LEAST = ("ettr", "goodput")  # all other bounds are upper bounds
_SECONDS = ("mttr", "mttr_p90")


def cases_of(
    score: Score, bounds: Bounds, rounds: Sequence[RoundScore], cut_short: str = "", planned: Sequence[str] = ()
) -> list[Case]:
    """The cases of a game day. `cut_short`: the reason if the day ended early. `planned`: the drawn faults."""
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


def _faults(
    score: Score, bounds: Bounds, rounds: Sequence[RoundScore], cut_short: str, planned: Sequence[str]
) -> Case:  # fmt: skip
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
    begun = {fault.id for scored in rounds for fault in scored.faults}
    if dropped := [name for name in planned if name not in begun]:
        names = ", ".join(dropped[:_NAMED]) + (f" and {len(dropped) - _NAMED} more" if dropped[_NAMED:] else "")
        felt += f"; not started, as they could not have ended before the day: {names}"
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
            reason = f"{score.damaged} of {score.rounds} {have} a failed assertion; {bound:g} may"
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
