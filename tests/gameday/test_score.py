"""The score: how the time of a round was used, the outcome of each fault, and the verdict on the whole day."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from torchaos.harness import registry
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.verdict import verdict_of as judged
from torchaos.harness.gameday import fault_outcomes
from torchaos.harness.gameday.day_grammar import Bounds
from torchaos.harness.gameday.fault_outcomes import Clock, FaultOutcome, Outcome, clock_of, outcomes_of
from torchaos.harness.gameday.report import to_look_at
from torchaos.harness.gameday.score import (
    RoundScore,
    Spread,
    best_interval_s,
    cases_of,
    expected_ettr,
    score_round,
    settled,
    total,
    verdict_of,
)
from torchaos.harness.interfaces import Harm, Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import After, Named, PlannedFault, read_as
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, ExitCode, Verdict, each_restart


def with_kill(run: Record, *asserts: str) -> Record:
    """As planned: one kill from outside."""
    fault = PlannedFault("kill", "process.kill", "node", Target((1,)), After(1.0), {}, "", "")
    plan = replace(run.plan, faults=(fault,), asserts=tuple(Named(name, {}) for name in asserts))
    return replace(run, plan=plan)


def scored(run: Record) -> RoundScore:
    return score_round(0, run, judged(run, [], "/run"))


def test_a_quiet_round_is_productive_but_for_its_checkpoints(trainer: Any) -> None:
    """Nothing is lost, down or stalled; saving is what a save takes."""
    clock = clock_of(trainer(steps=30, every=5, save_s=0.05).record())
    assert (clock.lost_s, clock.down_s, clock.stalled_s) == (0.0, 0.0, 0.0)
    assert clock.ettr is not None
    assert 0.5 < clock.ettr < 1.0
    assert clock.goodput == 1.0
    assert clock.checkpoint_s > 0


def test_every_second_is_accounted_for(trainer: Any) -> None:
    """From the first step to the last, in a round with a kill: the parts add up to the wall-clock time."""
    run = trainer(kills=[(18, 1)]).record()
    clock = clock_of(run)
    ends = [e.mono_s for e in run.events if e.kind is Kind.STEP]
    first = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.step == 1 and e.attempt == 0)
    assert clock.wall_s == pytest.approx(max(ends) - first)
    assert clock.lost_s > 0
    assert clock.down_s > 0


def test_steps_that_are_done_again_count_once(trainer: Any) -> None:
    """Killed in step 18 and resumed from 15: what steps 16 and 17 took the first time is lost, and counts once."""
    run = trainer(kills=[(18, 1)], save_s=0.0).record()
    ends = {e.step: e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 0}
    clock = clock_of(run)
    assert clock.lost_s == pytest.approx(ends[17] - ends[15])
    # The first step of the attempt that came back has no step before it: it is part of the time that the job was down.
    quiet = clock_of(trainer(save_s=0.0).record())
    assert clock.productive_s == pytest.approx(quiet.productive_s - (ends[16] - ends[15]))


def test_a_hang_is_stalled_time(trainer: Any) -> None:
    """All but one usual step of a step that took three seconds."""
    quiet, hung = clock_of(trainer().record()), clock_of(trainer(freeze=(10, 1, 3.0)).record())
    assert hung.stalled_s == pytest.approx(3.0, rel=0.05)
    assert hung.productive_s == pytest.approx(quiet.productive_s, rel=0.05)


def test_a_save_that_a_fault_held_up_is_no_usual_save(trainer: Any) -> None:
    """A freeze of three seconds in the middle of a save is stalled time, and no cost of checkpoints: neither the time
    for checkpoints nor the best interval grows by it."""
    quiet = trainer(steps=30, every=5, save_s=0.05).record()
    run = trainer(steps=30, every=5, save_s=0.05, freeze=(11, 1, 3.0)).record()
    (hit,) = run.of_kind(Kind.APPLYING)

    def held_up(event: Event) -> Event:
        if event.kind is not Kind.SAVE_END or event.step != 10:
            return event
        return replace(event, mono_s=hit.mono_s + 2.99, data={**event.data, "blocked_s": 3.05})

    run = replace(run, events=tuple(sorted(map(held_up, run.events), key=lambda event: event.mono_s)))
    assert clock_of(run).checkpoint_s == pytest.approx(clock_of(quiet).checkpoint_s, rel=0.05)
    assert clock_of(run).stalled_s == pytest.approx(3.0, rel=0.05)
    assert max(scored(run).saves_s) == pytest.approx(max(scored(quiet).saves_s), rel=0.05)
    assert len(scored(run).saves_s) == len(scored(quiet).saves_s) - 1


def test_a_job_that_never_came_back_was_down_to_the_end(trainer: Any) -> None:
    """From the last step to the moment that the run was ended; a run that was ended on purpose has no such time."""
    run = trainer(kills=[(18, 1)]).record()
    dead = [e for e in run.events if e.attempt in (0, None) and e.kind is not Kind.JOB_EXITED]
    last = max(e.mono_s for e in dead if e.kind is Kind.STEP)
    for enough, down in ((False, 60.0), (True, 0.0)):
        data = {"reason": "no_progress", "interrupted": False, "enough": enough}
        stopped = Event(Kind.STOPPED, "harness", 9999, 0.0, last + 60.0, data=data)
        assert clock_of(replace(run, events=(*dead, stopped))).down_s == pytest.approx(down)


def test_no_step_no_score(trainer: Any) -> None:
    """Of a run without a step nothing is said."""
    run = trainer().record()
    clock = clock_of(replace(run, events=tuple(e for e in run.events if e.kind is not Kind.STEP)))
    assert (clock.wall_s, clock.ettr, clock.goodput) == (0.0, None, None)


def test_what_came_of_a_kill(trainer: Any) -> None:
    """Recovered, with its parts and the steps that were done again."""
    (fault,) = scored(with_kill(trainer(kills=[(18, 1)]).record())).faults
    assert (fault.outcome, fault.lost_steps) == (Outcome.RECOVERED, 2)
    assert fault.parts["caught_up"]


def test_faults_within_one_recovery_interrupted_once(trainer: Any) -> None:
    """A second hit that the same restart ended is no second interruption, and its time is not lost twice."""
    run = with_kill(trainer(kills=[(18, 1)]).record())
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    more = replace(hit, seq=9_000, mono_s=hit.mono_s + 1e-4, data={**hit.data, "fault": "other"})
    twice = replace(run, events=tuple(sorted((*run.events, more), key=lambda e: e.mono_s)))
    one, both = scored(run), scored(twice)
    assert (len(one.restarts_s), len(both.restarts_s)) == (1, 1)
    assert both.invalid_s == pytest.approx(one.invalid_s)
    recoveries = judged(twice, [], "/run").recoveries
    assert (len(recoveries), len(each_restart(recoveries))) == (2, 1)
    assert total([both]).mtbf_s == both.clock.wall_s


def test_a_job_that_stays_down_is_invalid_to_the_end(trainer: Any) -> None:
    """The time of a recovery that never ended is not left out."""
    run = with_kill(trainer(kills=[(18, 1)]).record())
    dead = [e for e in run.events if e.attempt in (0, None) and e.kind is not Kind.JOB_EXITED]
    last_s = max(e.mono_s for e in dead)
    data = {"reason": "no_progress", "interrupted": False, "enough": False}
    stopped = Event(Kind.STOPPED, "harness", 9999, 0.0, last_s + 60.0, data=data)
    assert total([scored(replace(run, events=(*dead, stopped)))]).invalid_s > 60.0


def test_damage_is_put_down_to_the_fault(trainer: Any) -> None:
    """A trainer that forgets its sampler comes back, and the score says what it lost."""
    run = with_kill(trainer(kills=[(18, 1)], broken=frozenset({"sampler"})).record(), "sample_accounting")
    one = scored(run)
    assert one.faults[0].outcome is Outcome.DAMAGED
    assert one.faults[0].reason.startswith("sample_accounting: ")
    assert one.failed


def with_kills(run: Record, *asserts: str) -> Record:
    """The run, in which the kill of each attempt is a fault of its own: f000, f001 and so on."""
    hits = [e for e in run.events if e.kind is Kind.APPLYING]
    names = {id(hit): f"f{number:03d}" for number, hit in enumerate(hits)}
    events = [replace(e, data={**e.data, "fault": names[id(e)]}) if id(e) in names else e for e in run.events]
    faults = [
        PlannedFault(names[id(e)], "process.kill", "node", Target((e.rank or 0,)), After(1.0), {}, "", "") for e in hits
    ]
    plan = replace(run.plan, faults=tuple(faults), asserts=tuple(Named(name, {}) for name in asserts))
    return replace(run, plan=plan, events=tuple(events))


@pytest.mark.parametrize(
    ("broken", "assertion"),
    [
        ("sampler", "sample_accounting"), ("schedule", "lr_continuity"), ("rng", "loss_continuity"),
        ("momentum", "state_restored"),
    ],
)  # fmt: skip
def test_damage_is_put_down_to_the_last_fault_before_it(trainer: Any, broken: str, assertion: str) -> None:
    """Killed in step 18, resumed from 15 without a part of its state: steps 16 and 17 differ. The second kill, in step
    27, came later and is not blamed; as the job was damaged by then, nothing is said about its own results."""
    run = trainer(kills=[(18, 1), (27, 0)], broken=frozenset({broken}), state_seen=True).record()
    first, second = scored(with_kills(run, assertion)).faults
    assert (first.id, first.outcome) == ("f000", Outcome.DAMAGED)
    assert first.reason.startswith(f"{assertion}: ")
    assert (second.id, second.outcome) == ("f001", Outcome.UNJUDGED)
    assert "f000" in second.reason


def test_damage_is_put_down_to_the_fault_that_drove_the_ranks_apart(trainer: Any) -> None:
    """After the first kill, rank 1 goes on with parameters of its own, and the losses are those of another model. The
    second resume puts that right, so the step that is done again then differs. The parameters were recorded, and show
    that the first fault is to blame; the words of the verdict name no part of the second resume."""
    made = trainer(kills=[(18, 1), (27, 0)], state_seen=True).record()
    events = []
    for e in made.events:
        if e.kind is Kind.STEP and e.attempt == 1:
            own = {"parameters": f"{e.data['parameters']}+own"} if e.rank == 1 else {}
            e = replace(e, data={**e.data, **own, "losses": [loss + 0.25 * (e.step > 3) for loss in e.data["losses"]]})
        events.append(e)
    one = scored(with_kills(replace(made, events=tuple(events)), "loss_continuity", "parameter_digest"))
    first, second = one.faults
    assert "step 26" in one.failed[0]
    assert (first.outcome, second.outcome) == (Outcome.DAMAGED, Outcome.UNJUDGED)
    told = next(text for text in one.failed if text.startswith("loss_continuity"))
    assert "the ranks held different parameters after step 16 of attempt 1" in told
    assert "attempt that resumed" not in told


def test_the_reason_of_a_fault_is_what_decided_its_round(trainer: Any) -> None:
    """Of several failures that mean the same harm, the one that the verdict names: a round has one reason. It was
    compared with the first time, and speaks of no twin."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"momentum", "optimizer"}), state_seen=True).record()
    one = scored(with_kill(run, "loss_continuity", "state_restored", "parameter_digest"))
    assert len(one.failed) > 1
    assert one.faults[0].reason == one.reason
    assert [(told.outcome, told.rounds) for told in to_look_at([one])] == [("silent damage", (0,))]
    assert not [text for text in one.failed if "twin" in text]


def test_a_round_with_several_failed_assertions_is_one_damaged_round() -> None:
    """The bound counts rounds: `damaged` is no more than the number of rounds, and each failure is still named."""
    failed = ("loss_continuity: a", "parameter_digest: b", "checkpoint_integrity: c")
    found = rounds(Outcome.DAMAGED, verdict="failed", failed=failed)
    code, why = verdict(found)
    assert code is ExitCode.FAILED
    assert why[0].startswith("1 of 1 round has a failed assertion; 0 may: round 0: loss_continuity")
    (bound,) = (one for one in cases_of(total(found), Bounds(), found) if one.name == "damaged")
    assert bound.measured == {"damaged": 1}
    assert verdict(found, damaged=1)[0] is ExitCode.PASSED


def test_lost_work_is_put_down_to_the_fault_of_that_resume(trainer: Any) -> None:
    """The first resume began from scratch, the second from the newest checkpoint."""
    made = trainer(kills=[(18, 1), (27, 0)], every=5, rewinds=(1,))
    first, second = scored(with_kills(made.record(), "no_lost_work")).faults
    assert (first.outcome, second.outcome) == (Outcome.LOST_WORK, Outcome.RECOVERED)


def test_later_damage_is_put_down_to_the_later_fault(trainer: Any) -> None:
    """Only the second resume lost the sampler's position."""
    run = trainer(kills=[(18, 1), (27, 0)], broken=frozenset({"sampler"}), breaks=(2,)).record()
    first, second = scored(with_kills(run, "sample_accounting")).faults
    assert (first.outcome, second.outcome) == (Outcome.RECOVERED, Outcome.DAMAGED)


def done(run: Record, step: int) -> float:
    """When a step that counts was done, in seconds since the run began."""
    return max(one.mono_s for one in run.history.by_step()[step].values()) - run.events[0].mono_s


def test_damage_before_every_fault_is_put_down_to_none(trainer: Any) -> None:
    """The round has failed, and no fault came before the step: nothing is said about the results of its faults."""
    run = with_kills(trainer(kills=[(18, 1), (27, 0)]).record())
    early = Case("loss_continuity", "assertion", Verdict.FAILED, "it differs first in step 3", at_s=done(run, 3))
    found = outcomes_of(run, replace(judged(run, [], "/run"), cases=(early,)))
    assert [one.outcome for one in found] == [Outcome.UNJUDGED, Outcome.UNJUDGED]
    assert "wrong before any fault: loss_continuity: it differs first in step 3" in found[0].reason


def test_a_consequence_is_put_down_to_the_fault_of_its_cause(trainer: Any) -> None:
    """The loss of step 28 differs because the samples of step 16 did."""
    run = with_kills(trainer(kills=[(18, 1), (27, 0)]).record())
    cause = Case("sample_accounting", "assertion", Verdict.FAILED, "so it is", at_s=done(run, 16))
    later = Case(
        "loss_continuity", "assertion", Verdict.FAILED, "and so", follows="sample_accounting", at_s=done(run, 28)
    )
    for cases in ((cause, later), (later, cause)):
        first, second = outcomes_of(run, replace(judged(run, [], "/run"), cases=cases))
        assert (first.outcome, second.outcome) == (Outcome.DAMAGED, Outcome.UNJUDGED)


def test_a_job_that_shrank_is_put_down_to_the_fault_that_shrank_it(trainer: Any) -> None:
    """One rank of two since the first kill; the second kill changed nothing more."""
    run = trainer(kills=[(18, 1), (27, 0)], worlds={1: 1, 2: 1}, global_batch=True).record()
    first, second = scored(with_kills(run)).faults
    assert (first.outcome, second.outcome) == (Outcome.DEGRADED, Outcome.RECOVERED)


def test_no_fault_of_a_round_without_evidence_has_recovered(trainer: Any) -> None:
    """Nothing is known about the results of its job. A fault that got stuck is stuck all the same."""
    doubtful = rounds(Outcome.RECOVERED, Outcome.STUCK, verdict="inconclusive", reason="the journal is damaged")
    (told,) = settled(doubtful)
    assert [one.outcome for one in told.faults] == [Outcome.UNJUDGED, Outcome.STUCK]
    assert told.faults[0].reason == "its round is no evidence: the journal is damaged"
    whole = rounds(Outcome.RECOVERED)
    assert settled(whole) == whole


@pytest.mark.parametrize(
    ("names", "outcome"),
    [
        (("checkpoint_integrity",), Outcome.DAMAGED), (("no_lost_work",), Outcome.LOST_WORK),
        (("hang_detected",), Outcome.OTHERWISE), (("clean_exit",), Outcome.OTHERWISE),
        (("anybodys_own",), Outcome.OTHERWISE), (("restart_tier", "recovery_time"), Outcome.RECOVERED),
        (("clean_exit", "no_lost_work", "loss_continuity"), Outcome.DAMAGED),
    ],
)  # fmt: skip
def test_an_outcome_is_what_the_assertion_says_of_itself(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], outcome: Outcome
) -> None:
    """Damage is said only of assertions about results, the worst counts, and of anybody's own nothing is guessed."""
    find, own = registry.find, type("Own", (), {"harm": Harm.OTHER})  # as the registry completes it
    monkeypatch.setattr(registry, "find", lambda kind, name: own if name == "anybodys_own" else find(kind, name))
    run = with_kill(trainer(kills=[(18, 1)]).record())
    cases = tuple(Case(name, "assertion", Verdict.FAILED, "so it is") for name in names)
    (fault,) = outcomes_of(run, replace(judged(run, [], "/run"), cases=cases))
    assert fault.outcome is outcome


def test_every_assertion_of_ours_says_what_its_failure_means() -> None:
    """None is left to the neutral word."""
    assert not [name for name, one in registry.assertions().items() if getattr(one, "harm", Harm.OTHER) is Harm.OTHER]


def test_stuck_is_not_recovered(trainer: Any) -> None:
    """No step after the fault, and the run was ended for it."""
    run = with_kill(trainer(kills=[(18, 1)]).record())
    dead = [e for e in run.events if e.attempt in (0, None) and e.kind is not Kind.JOB_EXITED]
    assert scored(replace(run, events=tuple(dead))).faults[0].outcome is Outcome.STUCK


def test_a_fault_that_never_landed_is_unproved(trainer: Any) -> None:
    """It is neither recovered from nor stuck."""
    assert scored(with_kill(trainer().record())).faults[0].outcome is Outcome.UNPROVED


def test_a_smaller_job_is_degraded(trainer: Any) -> None:
    """It went on with one rank of two."""
    run = with_kill(trainer(kills=[(18, 1)], worlds={1: 1}, global_batch=True).record())
    assert scored(run).faults[0].outcome is Outcome.DEGRADED


@pytest.mark.parametrize(("before_s", "after_s", "slow"), [(0.012, 0.019, False), (0.12, 0.19, True)])
def test_a_few_milliseconds_are_no_degradation(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, before_s: float, after_s: float, slow: bool
) -> None:
    """Steps that take half as long again are a slower job; where that is some milliseconds, it is a busy machine."""
    usual = iter((before_s, after_s))
    monkeypatch.setattr(fault_outcomes, "usual_s", lambda steps: next(usual))
    monkeypatch.setattr(fault_outcomes, "_FEW", 3)
    run = with_kill(trainer(kills=[(18, 1)]).record())
    assert (fault_outcomes._slower(run, landings(run)) != ("", "")) is slow


def test_the_headline_counts_what_was_begun(trainer: Any) -> None:
    """Of four faults that were drawn three were begun."""
    found = rounds(Outcome.RECOVERED, Outcome.RECOVERED, Outcome.UNPROVED)
    _, why = verdict(found, planned=("f0", "f1", "f2", "f3"), unproved=0.5)
    dropped = "not started, as they could not have ended before the day: f3"
    assert why == [f"2 of 3 faults landed and were felt; {dropped}"]
    assert verdict(found, planned=("f0", "f1", "f2"), unproved=0.5)[1] == ["2 of 3 faults landed and were felt"]


def test_round_scores_survive_the_disk(trainer: Any) -> None:
    """As JSON and back they are the same."""
    one = scored(with_kill(trainer(kills=[(18, 1)]).record()))
    assert read_as(RoundScore, json.dumps(one.to_json())) == one
    assert json.loads(json.dumps(asdict(total([one]))))["outcomes"] == {"recovered": 1}


def rounds(*outcomes: Outcome, **more: Any) -> list[RoundScore]:
    parts = {"first_step": 2.0, "caught_up": 4.0}
    faults = tuple(FaultOutcome(f"f{n}", "process.kill", one, "", parts, 3) for n, one in enumerate(outcomes))
    clock = Clock(productive_s=80.0, lost_s=5.0, checkpoint_s=5.0, down_s=10.0)
    given = {
        "verdict": "passed", "reason": "", "clock": clock, "faults": faults, "saves_s": (0.5,) * 10,
        "intervals_s": (10.0,) * 9, "restarts_s": (2.0,) * len(outcomes), **more,
    }  # fmt: skip
    return [RoundScore(0, exit_code=0, run_dir="/run", world_size=2, **given)]


def verdict(
    found: list[RoundScore], cut_short: str = "", planned: Sequence[str] = (), **bounds: Any
) -> tuple[ExitCode, list[str]]:
    return verdict_of(cases_of(total(found), Bounds(**bounds), found, cut_short, planned))


def test_a_day_within_its_bounds_passes() -> None:
    """Each bound just so."""
    found = rounds(*[Outcome.RECOVERED] * 4)
    code, _ = verdict(found, ettr=0.8, goodput=0.85, mttr="4s", mttr_p90="4s", lost_steps=3, checkpoint_share=0.05)
    assert code is ExitCode.PASSED


@pytest.mark.parametrize(
    "bounds",
    [
        {"ettr": 0.81},
        {"goodput": 0.86},
        {"mttr": "3.9s"},
        {"mttr_p90": "3.9s"},
        {"lost_steps": 2},
        {"checkpoint_share": 0.04},
    ],
)
def test_each_bound_can_fail_the_day(bounds: dict[str, Any]) -> None:
    """And is named, with what was measured."""
    code, why = verdict(rounds(*[Outcome.RECOVERED] * 4), **bounds)
    assert code is ExitCode.FAILED
    assert why[0].startswith(next(iter(bounds)).replace("_", " "))


@pytest.mark.parametrize(
    ("found", "cut_short", "code"),
    [
        (rounds(Outcome.RECOVERED, Outcome.STUCK), "", ExitCode.FAILED),
        (rounds(Outcome.RECOVERED, failed=("loss_continuity: differs",)), "", ExitCode.FAILED),
        (rounds(Outcome.RECOVERED, Outcome.UNPROVED), "", ExitCode.INCONCLUSIVE),
        (rounds(), "", ExitCode.INCONCLUSIVE),
        ([], "", ExitCode.INCONCLUSIVE),
        (rounds(Outcome.RECOVERED), "SIGTERM was received", ExitCode.INCONCLUSIVE),
        ([replace(rounds(Outcome.RECOVERED)[0], exit_code=4)], "", ExitCode.ROLLBACK),
    ],
)
def test_no_day_passes_in_doubt(found: list[RoundScore], cut_short: str, code: ExitCode) -> None:
    """Stuck or damaged is failed; unproved, empty or cut short is inconclusive; what was not taken back is exit 4."""
    assert verdict(found, cut_short)[0] is code


def test_a_bound_on_what_was_not_seen_is_no_pass() -> None:
    """No recovery was measured, so its bound can't hold."""
    found = [replace(one, faults=tuple(replace(f, parts={}) for f in one.faults)) for one in rounds(Outcome.RECOVERED)]
    assert verdict(found, mttr="10s")[0] is ExitCode.INCONCLUSIVE


def test_formulas() -> None:
    """Young's interval and Meta's estimate, worked out by hand."""
    assert best_interval_s(2.0, 400.0) == pytest.approx(40.0)
    assert expected_ettr(1000.0, 30.0, 40.0, 2.0) == pytest.approx((1 - 50 / 1000) / 1.05)
    assert expected_ettr(10.0, 30.0, 40.0, 2.0) == 0.0
    assert expected_ettr(None, 30.0, 40.0, 2.0) is None


def test_spread_is_by_nearest_rank() -> None:
    """Of one to ten the ninth is the 90 % mark."""
    found = Spread.of([float(n) for n in range(10, 0, -1)])
    assert found is not None
    assert (found.count, found.mean, found.median, found.p90, found.most) == (10, 5.5, 5.5, 9.0, 10.0)
    assert Spread.of([]) is None


def test_the_sum_of_the_rounds() -> None:
    """Times add up, faults are counted by outcome and by kind, and GPU hours by the size of the job."""
    found = total(rounds(Outcome.RECOVERED, Outcome.STUCK) + rounds(Outcome.RECOVERED))
    assert found.clock.wall_s == 200.0
    assert found.outcomes == {"recovered": 2, "stuck": 1}
    assert found.kinds == {"process.kill": {"recovered": 2, "stuck": 1}}
    assert found.gpu_hours_lost == pytest.approx(40 * 2 / 3600)
    assert found.mtbf_s == pytest.approx(200 / 3)


def test_rounds_that_are_no_evidence_do_not_pass() -> None:
    """Their faults look recovered from, and nobody knows what a damaged journal said."""
    found = [replace(one, verdict="inconclusive", reason="the journal is damaged") for one in rounds(Outcome.RECOVERED)]
    code, why = verdict(found)
    assert code is ExitCode.INCONCLUSIVE
    assert "damaged" in why[0]


def test_a_round_without_a_restart_has_nothing_to_compare() -> None:
    """That is no lack of evidence where another round has it; it is one where none has, where the job did start again,
    or where the round is no evidence for another reason."""
    (whole,) = rounds(Outcome.RECOVERED)
    idle = replace(
        whole, number=1, verdict="inconclusive", reason="no step was done twice", untold=("loss_continuity",),
        restarted=False, decided_by="loss_continuity",
    )  # fmt: skip
    other = replace(whole, passed=("loss_continuity", "recovery_time"))
    assert verdict([other, idle])[0] is ExitCode.PASSED
    assert verdict([whole, idle])[0] is ExitCode.INCONCLUSIVE
    for doubtful in (
        replace(idle, restarted=True), replace(idle, decided_by=""), replace(idle, verdict="error"),
        replace(idle, untold=("loss_continuity", "faults")),
    ):  # fmt: skip
        assert verdict([other, doubtful])[0] is ExitCode.INCONCLUSIVE, doubtful


def test_lost_steps_that_nobody_knows_are_not_none() -> None:
    """A bound on them can't hold."""
    faults = tuple(replace(one, lost_steps=None) for one in rounds(Outcome.RECOVERED)[0].faults)
    assert verdict(rounds(faults=faults), lost_steps=0)[0] is ExitCode.INCONCLUSIVE


def test_of_several_landings_the_worst_counts(trainer: Any) -> None:
    """The first recovery did five steps again, the second none."""
    run = with_kill(trainer(kills=[(18, 1)]).record())
    result = judged(run, [], "/run")
    (one,) = result.recoveries
    for order in ((5, 0), (0, 5)):
        twice = tuple(replace(one, lost_steps=lost) for lost in order)
        (fault,) = score_round(0, run, replace(result, recoveries=twice)).faults
        assert fault.lost_steps == 5


def test_a_fault_after_the_last_step_is_not_stuck(trainer: Any) -> None:
    """There was nothing left to recover for: that proves nothing, and is no failure."""
    run = with_kill(trainer(kills=[(18, 1)]).record())
    result = judged(run, [], "/run")
    fault = replace(result.faults[0], verdict=Verdict.INCONCLUSIVE, reason="it came after the last step")
    (told,) = score_round(0, run, replace(result, faults=(fault,), recoveries=())).faults
    assert told.outcome is Outcome.UNPROVED
