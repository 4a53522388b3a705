"""sdc_detected: which witness found a corruption, how soon, and whether a checkpoint holds the corrupted state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.sdc_detected import SdcDetected
from torchaos.harness.analysis.findings.corruption import seen_by_others, seen_by_twin, sightings
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome, Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.record.record import Record

Bad = Callable[[int, int, int], bool]  # rank, attempt, global step


def never(rank: int, attempt: int, step: int) -> bool:
    return False


def with_state(run: Record, bad: Bad = never, fault: int | None = None, more: tuple[Event, ...] = ()) -> Record:
    """The run with check sums of its parameters, other ones where they are bad; and a corruption of rank 1 just before
    the step `fault`."""
    steps = {(e.attempt, e.rank, e.local_step): e.global_step for e in run.history.executions}
    events: list[Event] = []
    for event in run.events:
        if event.kind is Kind.STEP:
            step = steps[event.attempt or 0, event.rank or 0, event.step or 0] or 0
            wrong = bad(event.rank or 0, event.attempt or 0, step)
            event = replace(event, data={**event.data, "parameters": f"{step}{' bad' if wrong else ''}", "norm": 1.0})
            if step == fault and not any(e.kind is Kind.APPLYING for e in events):
                about = {"fault": "flip", "phase": None, "global_step": step, "pid": 1001}
                at = event.mono_s - 0.005
                events.append(Event(Kind.APPLYING, "rank1-a0", 90_000, 0.0, at, 1, 0, None, about))
                effect = {"fault": "flip", "effect": "parameter 0, element 0: 1.0 became 2.0"}
                events.append(Event(Kind.EFFECT, "rank1-a0", 90_001, 0.0, at, 1, 0, None, effect))
        events.append(event)
    return Record(run.plan, tuple(sorted((*events, *more), key=lambda e: e.mono_s)), run.artifacts)


def inventory(*wrong: int) -> dict[str, Any]:
    """Checkpoints of steps 5 to 30; the tensors of these are not as they should be."""
    return {
        "root": "/job/checkpoints",
        "checkpoints": [
            {"path": f"step-{step}", "format": "dcp", "complete": True, "loadable": True, "step": step,
             "tensors": {"weight": f"{step}{' bad' if step in wrong else ''}"}}
            for step in range(5, 31, 5)
        ],
    }  # fmt: skip


@pytest.fixture
def twin(trainer: Any) -> Record:
    return with_state(trainer().record(inventory=inventory()))


def refused(trainer: Any, step: int = 18, **how: Any) -> Record:
    """Rank 1 ends with an error of its own in this step, and the job comes back."""
    run = trainer(kills=[(step, 1)]).record(inventory=inventory())
    code = {Kind.RANK_EXITED: 1, Kind.ELASTIC_FAILURE: 1}
    events = [
        replace(e, data={**e.data, "exit_code": code[e.kind]}) if e.kind in code and e.data["exit_code"] == -9 else e
        for e in run.events
    ]
    return with_state(replace(run, events=tuple(events)), **how)


def test_what_the_job_refuses_before_it_is_saved_is_found(trainer: Any, twin: Record) -> None:
    """A job that ends the attempt in the very step has found it after one step, and no state was ever bad."""
    assert isinstance(SdcDetected(), Assertion)
    finding = SdcDetected(within=1, by="job").judge(refused(trainer), [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert (finding.measured["found_by"], finding.measured["after_steps"]) == ("job", 1)


def test_replicas_that_differ_are_found_and_what_was_saved_of_them_fails(trainer: Any, twin: Record) -> None:
    """Bad from step 18 on, in memory alone until step 20, is a pass while nothing was saved, and fails with the
    save."""

    def for_two_steps(rank: int, attempt: int, step: int) -> bool:
        return rank == 1 and step in (18, 19)

    base = trainer().record(inventory=inventory())
    finding = SdcDetected().judge(with_state(base, for_two_steps, fault=18), [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert (finding.measured["found_by"], finding.measured["after_steps"]) == ("replicas", 1)
    finding = SdcDetected().judge(with_state(base, lambda r, a, s: r == 1 and s >= 18, fault=18), [twin])
    assert finding.outcome is Outcome.FAILED
    assert "step-20, saved after step 20" in finding.reason


def test_steps_are_counted_from_the_corruption(trainer: Any, twin: Record) -> None:
    """A fault of another family that landed before it has nothing to be found by its state."""
    base = trainer().record(inventory=inventory())
    tenth = next(e for e in base.events if e.kind is Kind.STEP and (e.rank, e.step) == (1, 10))
    data = {"fault": "wait", "phase": None, "global_step": 11, "pid": 1001}
    early = Event(Kind.APPLYING, "rank1-a0", 90_002, 0.0, tenth.mono_s + 1e-4, 1, 0, None, data)
    run = with_state(base, lambda r, a, s: r == 1 and s in (18, 19), fault=18, more=(early,))
    faults = tuple(
        PlannedFault(name, inject, "rank", Target((1,)), After(), {}, "", "")
        for name, inject in (("wait", "process.freeze"), ("flip", "numeric.parameter"))
    )
    finding = SdcDetected(within=1).judge(replace(run, plan=replace(run.plan, faults=faults)), [twin])
    assert (finding.outcome, finding.measured["after_steps"]) == (Outcome.PASSED, 1), finding.reason


def test_a_checkpoint_that_nobody_saw_saved_is_looked_at_too(trainer: Any, twin: Record) -> None:
    """Of a format whose saves are not seen: without a restart, the attempt that was hit saved what lies there."""
    run = with_state(trainer().record(inventory=inventory(20)), lambda r, a, s: r == 1 and s == 18, fault=18)
    quiet = replace(run, events=tuple(e for e in run.events if e.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END)))
    finding = SdcDetected().judge(quiet, [twin])
    assert (finding.outcome, "step-20 differs from the twin's in weight" in finding.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_job_that_goes_back_to_an_earlier_state_has_found_it(trainer: Any, in_memory: bool) -> None:
    """Before the update, so that no state was ever bad. If another fault came in between, it may be the reason."""
    about = {"loads_seen": not in_memory, "state_seen": True, "named": True}
    run = trainer(raises=(18, 1, 8.0), **about).record(inventory=inventory())
    straight = trainer(state_seen=True, named=True).record(inventory=inventory())
    finding = SdcDetected(within=1, by="job").judge(run, [straight])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.reason.startswith("found after 1 step by the job itself, which went back to step 15; no checkpoint")
    usual = SdcDetected(within=1, by="job").judge(run, [run])  # the twin goes back as well
    assert usual.outcome is Outcome.INCONCLUSIVE, usual.reason
    own = replace(run, events=tuple(event for event in run.events if event.kind is not Kind.APPLYING))
    assert own.history.program_returns
    usual = SdcDetected(within=1, by="job").judge(run.beside([own]), [own])
    assert "by the job" not in usual.reason
    hit = next(run.of_kind(Kind.APPLYING))
    second = replace(hit, seq=10_000, mono_s=hit.mono_s + 1e-3, data={**hit.data, "fault": "another"})
    events = sorted([*run.events, second], key=lambda event: event.mono_s)
    finding = SdcDetected(within=1, by="job").judge(replace(run, events=tuple(events)), [straight])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_a_loss_that_is_no_number_is_a_sighting(trainer: Any) -> None:
    """Of the first step whose loss is not finite, and not of one before the fault."""
    base = with_state(trainer().record(), fault=18)
    hit = next(e for e in base.events if e.kind is Kind.APPLYING)
    for since, step in ((hit.mono_s, 19), (0.0, 3)):
        blown = replace(base, events=tuple(
            replace(e, data={**e.data, "losses": [math.inf]}) if e.kind is Kind.STEP and e.step in (3, 19) else e
            for e in base.events
        ))  # fmt: skip
        assert [(one.who, one.step) for one in sightings(blown, since)] == [("loss", step)]


def test_another_ranks_gradients_are_evidence(trainer: Any) -> None:
    """A norm that can't be right on a rank that was not hit shows that the fault was felt; one of the rank that was hit
    does not, nor one that was there before."""
    base = with_state(trainer().record(), fault=18)
    hit = next(e for e in base.events if e.kind is Kind.APPLYING)
    said = {"text": "the gradient's norm is 1e9", "norm": 1e9}
    for rank, after_s, felt in ((0, 0.01, True), (1, 0.01, False), (0, -0.01, False)):
        spike = Event(Kind.NOTE, "spy", 90_003, 0.0, hit.mono_s + after_s, rank, 0, None, said)
        found = seen_by_others(replace(base, events=(*base.events, spike)), "flip")
        assert (found is not None) is felt
        if found:
            assert found.events == (("spy", 90_003),)
            assert "parameter 0, element 0: 1.0 became 2.0; on rank 0, which was not hit" in found.what


def test_state_that_all_replicas_share_is_found_by_nobody(trainer: Any, twin: Record) -> None:
    """Equal and wrong on all ranks: only the twin shows it, which nobody has in production, so that it fails."""
    base = trainer().record(inventory=inventory())
    finding = SdcDetected().judge(with_state(base, lambda r, a, s: s in (18, 19), fault=18), [twin])
    assert finding.outcome is Outcome.FAILED
    assert "nobody found it in 2 bad steps" in finding.reason


def test_a_checkpoint_that_differs_from_the_twins_fails_whoever_found_it(trainer: Any, twin: Record) -> None:
    """What lies on disk counts even where no step's check sum was bad: so does the optimizer's state. Saved after a
    restart from good state, it is not the corruption's, and inconclusive."""
    run = with_state(trainer().record(inventory=inventory(25)), fault=18)
    finding = SdcDetected().judge(run, [twin])
    assert finding.outcome is Outcome.FAILED
    assert "step-25 differs from the twin's in weight" in finding.reason
    run = replace(refused(trainer), artifacts={"inventory": inventory(25)})
    assert SdcDetected().judge(run, [twin]).outcome is Outcome.INCONCLUSIVE


def test_another_order_of_sums_after_the_restart_is_not_taken_for_corruption(trainer: Any, twin: Record) -> None:
    """The job found it, resumed from good state, and has other last bits from then on: inconclusive, not failed."""
    run = refused(trainer, bad=lambda rank, attempt, step: attempt == 1)
    finding = SdcDetected().judge(run, [twin])
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert "numbers are added in another order" in finding.reason


def test_an_end_that_another_fault_may_have_caused_is_no_finding(trainer: Any, twin: Record) -> None:
    """A second fault before the rank ended, or an end by a signal, is not the job's finding."""
    run = refused(trainer)
    at = next(e for e in run.events if e.kind is Kind.APPLYING).mono_s + 1e-4
    second = {"fault": "other", "phase": None, "global_step": 18, "pid": 1000}
    other = Event(Kind.APPLYING, "harness", 95_000, 0.0, at, 0, 0, None, second)
    both = replace(run, events=tuple(sorted((*run.events, other), key=lambda e: e.mono_s)))
    assert SdcDetected(by="job").judge(both, [twin]).outcome is not Outcome.PASSED
    killed = with_state(trainer(kills=[(18, 1)]).record(inventory=inventory()))
    assert SdcDetected(by="job").judge(killed, [twin]).outcome is not Outcome.PASSED


def test_a_gradient_norm_is_a_sighting_and_can_come_too_late(trainer: Any, twin: Record) -> None:
    """An agent that saw the norm jump two steps later is too late for a bound of one, and in time for three."""
    base = trainer().record(inventory=inventory())
    bad = with_state(base, lambda r, a, s: s in (18, 19), fault=18)
    at = next(one.mono_s for one in bad.history.executions if one.global_step == 19)
    note = Event(Kind.NOTE, "rank0-a0", 91_000, 0.0, at + 1e-4, 0, 0, None, {"text": "norm", "norm": 99.0})
    run = replace(bad, events=tuple(sorted((*bad.events, note), key=lambda e: e.mono_s)))
    assert SdcDetected(within=1).judge(run, [twin]).outcome is Outcome.FAILED
    finding = SdcDetected(within=3).judge(run, [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured["found_by"] == "norm"
    assert SdcDetected(within=3, by="job").judge(run, [twin]).outcome is Outcome.FAILED


def test_what_cannot_be_told_is_inconclusive(trainer: Any, twin: Record) -> None:
    """No fault, no check sums, no twin, a twin that is no measure, no checkpoint to look at: each says which it is."""
    base = trainer().record(inventory=inventory())
    early = with_state(base, lambda r, a, s: s >= 10, fault=18)
    cases = {
        "no fault landed": (with_state(base), [twin]),
        "could be seen": (trainer(kills=[(18, 1)]).record(), []),
        "before any fault": (early, [twin]),
        "without a twin": (refused(trainer), []),
        "nothing to find": (with_state(base, fault=18), [twin]),
        "could not be read": (replace(refused(trainer), artifacts={}), [twin]),
    }
    for words, (run, twins) in cases.items():
        finding = SdcDetected().judge(run, twins)
        assert finding.outcome is Outcome.INCONCLUSIVE, (words, finding.reason)
        assert words in finding.reason


def test_a_flip_is_felt_only_where_somebody_else_shows_it(trainer: Any, twin: Record) -> None:
    """Another rank's check sum, or the twin's on a rank that was not hit; neither where the target alone says so."""
    base = trainer().record(inventory=inventory())
    alone = with_state(base, lambda r, a, s: r == 1 and s >= 18, fault=18)
    shared = with_state(base, lambda r, a, s: s >= 18, fault=18)
    silent = with_state(base, fault=18)
    assert "the ranks no longer hold the same parameters" in getattr(seen_by_others(alone, "flip"), "what", "")
    assert seen_by_others(shared, "flip") is None
    assert "rank 0 differ from the twin's" in getattr(seen_by_twin(shared, [twin], "flip"), "what", "")
    assert (seen_by_others(silent, "flip"), seen_by_twin(silent, [twin], "flip")) == (None, None)
    before = with_state(base, lambda r, a, s: s >= 17, fault=18)
    assert seen_by_twin(before, [twin], "flip") is None
