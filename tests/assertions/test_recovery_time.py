"""recovery_time: the parts of a recovery, its bounds, and a job that never caught up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from torchaos.assertions.recovery_time import RecoveryTime
from torchaos.harness.analysis.recovery_times import PARTS, recoveries
from torchaos.harness.analysis.verdict import records_of
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.terminal.headline import outcome_in_words

KILL = [(18, 1)]


def _without(run: Any, wanted: Any) -> Any:
    return replace(run, events=tuple(event for event in run.events if not wanted(event)))


def test_bare_assertion_passes_when_the_job_caught_up(trainer: Any) -> None:
    """Without bounds, catching up at all is what counts."""
    assert isinstance(RecoveryTime(), Assertion)
    finding = RecoveryTime().judge(trainer(kills=KILL).record(), [])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "with 2 steps done again" in finding.reason


def test_bounds_are_written_as_durations() -> None:
    """The scenario's words become seconds."""
    assert TypeAdapter(RecoveryTime).validate_python({"catch_up": "1m30s", "lost_steps": 5}) == RecoveryTime(
        90.0, lost_steps=5
    )


def test_parts_come_in_order_and_from_the_right_events(trainer: Any) -> None:
    """Each part is the time of its own event since the fault was applied."""
    run = trainer(kills=KILL).record()
    (one,) = recoveries(run)
    at = {kind: [e.mono_s for e in run.events if e.kind is kind] for kind in Kind}
    hit = at[Kind.APPLYING][0]
    taken = [took for took in (one.parts[part] for part in PARTS) if took is not None]
    assert len(taken) == len(PARTS)
    assert taken == sorted(taken)
    assert one.parts["felt"] == pytest.approx(0.002)
    assert one.parts["detected"] == pytest.approx(at[Kind.ELASTIC_FAILURE][0] - hit)
    assert one.parts["torn_down"] == pytest.approx(at[Kind.RANK_EXITED][1] - hit)
    assert one.parts["rendezvous"] == pytest.approx(at[Kind.ELASTIC_RENDEZVOUS][0] - hit)
    assert one.parts["workers_up"] == pytest.approx(at[Kind.RANK_UP][-1] - hit)
    assert one.parts["imported"] == pytest.approx(at[Kind.AGENT_STARTED][-1] - hit)
    assert one.parts["joined"] == pytest.approx(at[Kind.GROUP_JOINED][-1] - hit)
    assert one.parts["prepared"] == pytest.approx(at[Kind.GROUP_JOINED][-1] - 0.005 - hit)
    assert one.parts["set_up"] == pytest.approx(at[Kind.LOAD_BEGIN][-1] - hit)
    assert one.parts["restored"] == pytest.approx(at[Kind.LOAD_END][-1] - hit)
    later = [e for e in run.events if e.kind is Kind.STEP and e.attempt == 1]
    assert one.parts["first_step"] == pytest.approx(later[0].mono_s - hit)
    assert one.parts["caught_up"] == pytest.approx(next(e.mono_s for e in later if e.step == 3) - hit)
    assert (one.fault, one.lost_steps) == ("kill", 2)


def test_the_load_of_one_rank_alone_is_the_load_of_the_job(trainer: Any) -> None:
    """A rank that gets its state by a broadcast loads no file. A load whose begin was not seen has none."""
    run = trainer(kills=KILL).record()
    alone = _without(run, lambda event: event.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) and event.rank == 1)
    at = next(event.mono_s for event in alone.events if event.kind is Kind.LOAD_BEGIN)
    (one,) = recoveries(alone)
    assert one.parts["set_up"] == pytest.approx(at - one.at_s)
    (blind,) = recoveries(_without(run, lambda event: event.kind is Kind.LOAD_BEGIN and event.rank == 1))
    assert blind.parts["set_up"] is None


@pytest.mark.parametrize(
    "part", ["felt", "detect", "torn_down", "rendezvous", "workers_up", "restored", "first_step", "catch_up"]
)
def test_each_part_has_its_bound(trainer: Any, part: str) -> None:
    """A part that takes longer than allowed fails by name and amount, and passes within it."""
    run = trainer(kills=KILL).record()
    bounds: Any = {part: 60.0}
    assert RecoveryTime(**bounds).judge(run, []).outcome is Outcome.PASSED
    finding = RecoveryTime(**{**bounds, part: 0.001}).judge(run, [])
    assert (finding.outcome, "more than allowed" in finding.reason) == (Outcome.FAILED, True)
    assert finding.bound == {part: 0.001}


def test_lost_steps_and_invalid_time_have_bounds(trainer: Any) -> None:
    """A job that resumed from an older checkpoint lost work though it is bitwise right; so does slow saving."""
    run = trainer(kills=KILL, every=10).record()
    finding = RecoveryTime(lost_steps=5).judge(run, [])
    assert (finding.outcome, "7 steps had to be done again" in finding.reason) == (Outcome.FAILED, True)
    caught_up = recoveries(run)[0].parts["caught_up"]
    assert caught_up is not None
    assert finding.measured["invalid_time"] == pytest.approx(caught_up + 3 * 0.05)
    assert RecoveryTime(invalid_time=0.5).judge(run, []).outcome is Outcome.FAILED
    assert RecoveryTime(lost_steps=7, invalid_time=60.0).judge(run, []).outcome is Outcome.PASSED


def _again_at(run: Any, since_s: float, fault: str = "other") -> Any:
    """The record with one more hit of attempt 0, so many seconds after the first."""
    hit = next(event for event in run.events if event.kind is Kind.APPLYING)
    more = replace(hit, seq=9_000, mono_s=hit.mono_s + since_s, data={**hit.data, "fault": fault})
    return replace(run, events=tuple(sorted((*run.events, more), key=lambda event: event.mono_s)))


def test_recoveries_that_overlap_count_once(trainer: Any) -> None:
    """A fault that comes before the job has recovered from another interrupts nothing more; one that comes later
    does."""
    run = trainer(kills=KILL).record()
    alone, both = (RecoveryTime().judge(one, []).measured for one in (run, _again_at(run, 1e-4)))
    assert (alone["interruptions"], both["interruptions"]) == (1, 1)
    assert both["invalid_time"] == pytest.approx(alone["invalid_time"])
    assert (
        RecoveryTime(invalid_time=alone["invalid_time"] + 0.01).judge(_again_at(run, 1e-4), []).outcome
        is Outcome.PASSED
    )
    twice = trainer(kills=[(8, 1), (18, 1)]).record()
    measured, found = RecoveryTime().judge(twice, []).measured, recoveries(twice)
    took_s = sum(one.parts["caught_up"] or 0.0 for one in found)
    assert measured["interruptions"] == 2
    assert took_s < measured["invalid_time"] < took_s + 7 * 0.06


def test_a_save_within_a_recovery_counts_once(trainer: Any) -> None:
    """The job saves before it has got further than before the fault: that time is part of the recovery already."""
    run = trainer(kills=KILL).record()
    again_s = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 1 and e.step == 1)
    early = [e for e in run.events if e.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) and e.attempt == 0 and e.step == 5]
    more = [
        replace(e, seq=9_000 + place, source=f"rank{e.rank}-a1", attempt=1, step=1, mono_s=again_s + 1e-4 * place)
        for place, e in enumerate(early)
    ]
    saving = replace(run, events=tuple(sorted((*run.events, *more), key=lambda event: event.mono_s)))
    assert len(saving.history.saves) > len(run.history.saves)
    invalid = [RecoveryTime().judge(one, []).measured["invalid_time"] for one in (run, saving)]
    assert invalid[1] == pytest.approx(invalid[0])


def test_two_kills_within_one_recovery() -> None:
    """A recorded run: the second kill hit the attempt that came back from the first."""
    run, _ = records_of(RunDir(Path(__file__).parents[1] / "data" / "runs" / "kill-twice"))
    measured = RecoveryTime().judge(run, []).measured
    assert (measured["interruptions"], round(measured["invalid_time"], 2)) == (1, 8.19)


def test_ranks_that_save_side_by_side_cost_once(trainer: Any) -> None:
    """Two ranks with a file of their own each: what is invalid is what one rank waited, not both together."""
    run = trainer(kills=KILL, every=10).record()
    own = tuple(
        replace(e, data={**e.data, "path": f"{e.data['path']}/rank{e.rank}.pt"})
        if e.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END)
        else e
        for e in run.events
    )
    apart = RecoveryTime().judge(replace(run, events=own), [])
    assert apart.measured["invalid_time"] == pytest.approx(RecoveryTime().judge(run, []).measured["invalid_time"])


def test_a_job_that_never_caught_up_fails(trainer: Any) -> None:
    """It came back and ended below where it had been: that is no recovery, whatever its exit code."""
    run = _without(trainer(kills=KILL).record(), lambda e: e.attempt == 1 and (e.step or 0) > 2)
    twins = [trainer().record()]
    finding = RecoveryTime().judge(run, twins)
    assert finding.outcome is Outcome.FAILED
    assert "it came back, and it never got past step 17" in finding.reason
    unnoticed = _without(run, lambda e: e.kind is Kind.ELASTIC_FAILURE)
    assert recoveries(unnoticed)[0].parts["detected"] is None  # the end of the whole job is no detection
    gone = _without(run, lambda e: e.attempt == 1)
    assert "it did not come back: it never got past step 17" in RecoveryTime().judge(gone, twins).reason
    alone = RecoveryTime().judge(run, [])
    assert (alone.outcome, "after the last step" in alone.reason) == (Outcome.INCONCLUSIVE, True), (
        "nobody knows the end"
    )


def test_a_step_that_the_others_still_finish_is_no_recovery(trainer: Any) -> None:
    """Rank 0 ends its step after rank 1 was killed in it; only the next attempt can catch up."""
    run = trainer(kills=KILL).record()
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    model = next(e for e in run.events if e.kind is Kind.STEP and e.rank == 0 and e.step == 17)
    events = sorted([*run.events, replace(model, step=18, mono_s=hit.mono_s + 0.001)], key=lambda e: e.mono_s)
    (one,) = recoveries(replace(run, events=tuple(events)))
    assert one.parts["caught_up"] is not None
    assert one.parts["first_step"] is not None
    assert one.parts["caught_up"] > one.parts["first_step"]
    assert one.lost_steps == 3


def test_a_freeze_recovers_without_a_restart(trainer: Any) -> None:
    """The frozen rank's own first step beyond the highest one is the recovery; nothing is lost."""
    (one,) = recoveries(trainer(freeze=(18, 1, 2.0)).record())
    assert one.parts["caught_up"] == pytest.approx(2.0, abs=0.1)
    assert (one.lost_steps, one.parts["rendezvous"]) == (0, None)


def test_a_later_death_is_not_how_a_freeze_was_felt(trainer: Any) -> None:
    """The rank went on, and died of another fault long after: of the freeze that says nothing."""
    run = trainer(freeze=(8, 1, 2.0), kills=[(18, 1)]).record()
    freeze, kill = recoveries(run)
    assert (freeze.parts["felt"], freeze.parts["caught_up"] is not None) == (None, True)
    assert kill.parts["felt"] is not None


def test_a_second_fault_during_the_recovery_is_counted_from_itself(trainer: Any) -> None:
    """Two kills, the second before the job had caught up: two recoveries that end together, and one interruption."""
    run = trainer(kills=[(18, 1), (17, 0)]).record()
    first, second = recoveries(run)
    hits = [e.mono_s for e in run.events if e.kind is Kind.APPLYING]
    assert first.parts["caught_up"] is not None
    assert second.parts["caught_up"] is not None
    assert first.parts["caught_up"] + hits[0] == pytest.approx(second.parts["caught_up"] + hits[1])
    assert RecoveryTime().judge(run, []).measured["interruptions"] == 1


def test_a_killed_agent_recovers_by_resubmission_only(trainer: Any) -> None:
    """Orphans that keep stepping after torchrun itself was killed have not recovered."""
    run = trainer(kills=KILL, resubmitted=True).record()
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    node = replace(hit, rank=None, attempt=None, data={**hit.data, "pid": 50})
    model = next(e for e in run.events if e.kind is Kind.STEP and e.rank == 0 and e.step == 17)
    orphan = replace(model, step=18, mono_s=hit.mono_s + 0.01)
    events = sorted([orphan, *(node if e is hit else e for e in run.events)], key=lambda e: e.mono_s)
    (one,) = recoveries(replace(run, events=tuple(events)))
    assert one.parts["caught_up"] is not None
    assert one.parts["caught_up"] > 1.0


@pytest.mark.parametrize("seen", [True, False])
def test_a_rank_whose_later_steps_were_not_seen(trainer: Any, seen: bool) -> None:
    """A training function that is called again in the same process after an exception. If no later step of the rank
    that was hit was seen, and the others came to the end, it is not known when the job went on; that the process left
    at the end is not how the fault was felt."""
    run, twin = trainer(raises=(18, 1, 8.0), blind=not seen).record(), trainer().record()
    finding = RecoveryTime().judge(run, [twin])
    assert finding.outcome is (Outcome.PASSED if seen else Outcome.INCONCLUSIVE), finding.reason
    (one,) = recoveries(run, [twin])
    assert one.parts["felt"] is None
    if not seen:
        assert "no step of rank 1 was seen after it" in finding.reason
        assert not {one.parts[part] for part in PARTS} - {None}
        assert outcome_in_words(one) == "later steps of rank 1 were not seen"


def test_nothing_landed_or_nothing_seen_is_inconclusive(trainer: Any) -> None:
    """No fault, no steps, no load to be bounded, or steps that can't be placed: nothing is claimed."""
    assert RecoveryTime().judge(trainer().record(), []).outcome is Outcome.INCONCLUSIVE
    run = trainer(kills=KILL).record()
    blind = RecoveryTime().judge(_without(run, lambda e: e.kind is Kind.STEP), [])
    assert (blind.outcome, "no step was seen" in blind.reason) == (Outcome.INCONCLUSIVE, True)
    unloaded = RecoveryTime(restored=5.0).judge(trainer(kills=KILL, loads_seen=False).record(), [])
    assert (unloaded.outcome, "the checkpoint was loaded" in unloaded.reason) == (Outcome.INCONCLUSIVE, True)
    lost = trainer(kills=KILL, loads_seen=False, counters_seen=False, samples_seen=False, broken=frozenset({"rng"}))
    assert "it is not known which global steps" in RecoveryTime().judge(lost.record(), []).reason


def test_log_lines_are_enough_for_a_recovery(trainer: Any) -> None:
    """Without an agent the printed steps tell when the job caught up."""
    run = trainer(kills=KILL, log_only=1).record()
    finding = RecoveryTime(catch_up=60.0).judge(run, [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_what_an_outside_fault_did_is_felt_by_its_effect(trainer: Any) -> None:
    """An effect that the injector saw counts as felt where no process died."""
    run = trainer(freeze=(18, 1, 2.0)).record()
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    seen = Event(Kind.EFFECT, "harness", 9_999, 0.0, hit.mono_s + 0.5, data={"fault": "freeze", "effect": "drops"})
    (one,) = recoveries(replace(run, events=(*run.events, seen)))
    assert one.parts["felt"] == pytest.approx(0.5)
