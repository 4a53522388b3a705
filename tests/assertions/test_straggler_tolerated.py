"""straggler_tolerated: step times against the twin's, and when they can't be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.straggler_tolerated import StragglerTolerated
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Finding, Outcome, Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import After, PlannedFault

FIRST, LAST = 12, 20  # steps during which the fault is on


def stretched(run: Any, seconds: Callable[[int], float], fault: bool = True, saves: bool = False) -> Any:
    """The run with steps of other lengths (global step -> seconds), and a fault between two of them. `saves`: it saves,
    which takes no time that `seconds` does not have."""
    events: list[Event] = []
    for one in run.events:
        if one.kind is Kind.STEP:
            at = 200.0 + sum(seconds(step) for step in range(1, (one.step or 0) + 1)) + 1e-6 * (one.rank or 0)
            events.append(replace(one, mono_s=at))
            if fault and (one.step, one.rank) == (FIRST - 1, 1):
                data = {"fault": "slow", "phase": None, "global_step": FIRST, "pid": 1001}
                events.append(Event(Kind.APPLYING, "rank1-a0", 5000, 0.0, at + 1e-5, 1, 0, FIRST - 1, data))
            if fault and (one.step, one.rank) == (LAST, 1):
                healed = {"fault": "slow", "verified": True}
                events.append(Event(Kind.ROLLED_BACK, "harness", 5001, 0.0, at + 1e-5, None, None, None, healed))
        elif one.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END):
            at = 200.0 + sum(seconds(step) for step in range(1, (one.step or 0) + 1)) + 2e-6
            events += [replace(one, mono_s=at)] * saves
        else:
            events.append(replace(one, mono_s=one.mono_s + (1000.0 if one.kind is Kind.RANK_EXITED else 0.0)))
    return replace(run, events=tuple(sorted(events, key=lambda event: event.mono_s)))


def judge(
    trainer: Any, own: Callable[[int], float], twin: Callable[[int], float], ratio: float = 1.5, saves: bool = False
) -> Finding:
    run = stretched(trainer().record(), own, saves=saves)
    calm = stretched(trainer().record(), twin, fault=False, saves=saves)
    return StragglerTolerated(ratio).judge(run, [calm])


def on(factor: float) -> Callable[[int], float]:
    return lambda step: 0.1 * factor if FIRST <= step <= LAST else 0.1


def even(_step: int) -> float:
    return 0.1


def test_a_slower_job_fails(trainer: Any) -> None:
    """Steps of three times the length while the fault is on: the ratio is told, and which steps were slow."""
    finding = judge(trainer, on(3.0), even)
    assert isinstance(StragglerTolerated(), Assertion)
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert finding.measured["ratio"] == pytest.approx(2.8)  # of these nine, and the one that was just beginning
    assert finding.measured["slow_steps"] == list(range(FIRST, LAST + 1))
    assert finding.bound == {"ratio": 1.5}


def test_within_the_bound_it_passes(trainer: Any) -> None:
    """The same run under a bound of four."""
    finding = judge(trainer, on(3.0), even, ratio=4.0)
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_a_fault_that_is_not_taken_back_is_on_until_the_end(trainer: Any) -> None:
    """All steps from its landing on are compared, those after the others' end of it too."""
    run, calm = stretched(trainer().record(), lambda step: 0.3 if step >= FIRST else 0.1), trainer().record()
    run = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.ROLLED_BACK))
    finding = StragglerTolerated(1.5).judge(run, [stretched(calm, even, fault=False)])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert finding.measured["slow_steps"] == list(range(FIRST, 31))


def test_one_slow_step_does_not_make_the_mean(trainer: Any) -> None:
    """A single step of twice the length among nine is named, and tolerated."""
    finding = judge(trainer, lambda step: 0.2 if step == 15 else 0.1, even)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert (finding.measured["slow_steps"], finding.measured["worst_step"]) == ([15], 15)


def test_a_twin_that_varies_as_much_decides_nothing(trainer: Any) -> None:
    """The twin itself was three times as slow for a while: the bound tells nothing."""
    finding = judge(trainer, on(3.0), lambda step: 0.3 if step > 20 else 0.1)
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert "the twin's own steps vary" in finding.reason


def test_another_load_before_the_fault_decides_nothing(trainer: Any) -> None:
    """A run that was slower than the twin already before the fault says nothing about the fault."""
    finding = judge(trainer, lambda step: 0.2, even)
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert "before the fault" in finding.reason


@pytest.mark.parametrize(("during_s", "outcome"), [(0.16, Outcome.INCONCLUSIVE), (0.3, Outcome.FAILED)])
def test_what_was_slow_before_is_not_the_faults(trainer: Any, during_s: float, outcome: Outcome) -> None:
    """A run that took 1.4 times as long all along, and 1.6 times with the fault: the fault's part was 1.14. With three
    times as long, the fault's part is beyond the bound too."""
    finding = judge(trainer, lambda step: during_s if FIRST <= step <= LAST else 0.14, even)
    assert finding.outcome is outcome, finding.reason
    assert finding.measured["before"] == pytest.approx([1.4, 1.4], abs=0.01)


def test_noise_before_the_fault_is_not_the_faults(trainer: Any) -> None:
    """Single steps of four times the length come before the fault as well as in it."""
    finding = judge(trainer, lambda step: 0.4 if step in (4, 13, 17, 18) else 0.1, even)
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "how much of this was the fault's is not known" in finding.reason


@pytest.mark.parametrize(
    ("before_s", "during_s", "outcome"),
    [
        (0.07, 0.12, Outcome.INCONCLUSIVE), (0.03, 0.036, Outcome.PASSED), (0.03, 0.06, Outcome.INCONCLUSIVE),
        (0.03, 0.3, Outcome.FAILED),
    ],
)  # fmt: skip
def test_a_run_that_was_faster_before_must_keep_the_bound_without_that(
    trainer: Any, before_s: float, during_s: float, outcome: Outcome
) -> None:
    """The twin was made on a busy machine: steps of 1.2 times its length are 1.7 times what they had been. A job that
    keeps the bound by both is no slower, however busy the machine was for the twin."""
    finding = judge(trainer, lambda step: during_s if FIRST <= step <= LAST else before_s, even)
    assert finding.outcome is outcome, finding.reason


@pytest.mark.parametrize("factor", [1.2, 3.0])
def test_the_first_save_of_the_twin_is_not_its_pace(trainer: Any, factor: float) -> None:
    """It takes much longer than all steps before it, as modules are imported for it and no file is in the page cache
    yet. Neither the noise nor the speed before the fault is measured by it, and a save while the fault is on is not its
    effect either."""

    def twin(step: int) -> float:
        return 3.0 if step == 6 else 0.3 if step % 5 == 1 else 0.1

    finding = judge(trainer, lambda step: 0.5 if step % 5 == 1 else on(factor)(step), twin, saves=True)
    assert finding.outcome is (Outcome.FAILED if factor > 1.5 else Outcome.PASSED), finding.reason
    assert finding.measured["before"] == pytest.approx([1.0, 1.0], abs=0.01)
    assert finding.measured["left_out"] == 2  # steps 16 and 21, which was just beginning
    assert finding.reason.endswith("Left out: 2 steps in which a checkpoint was saved.")


def test_a_job_that_saves_in_each_step_is_compared_as_it_is(trainer: Any) -> None:
    """There is no step without a save."""
    finding = StragglerTolerated(1.5).judge(
        stretched(trainer(every=1).record(), on(3.0), saves=True),
        [stretched(trainer(every=1).record(), even, fault=False, saves=True)],
    )
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "left_out" not in finding.measured


def test_without_a_twin_it_is_inconclusive(trainer: Any) -> None:
    """There is nothing to compare with."""
    assert StragglerTolerated().judge(stretched(trainer().record(), on(3.0)), []).outcome is Outcome.INCONCLUSIVE


def test_without_a_fault_it_is_inconclusive(trainer: Any) -> None:
    """Nothing landed: nothing was tolerated, however fast the job was."""
    run = stretched(trainer().record(), even, fault=False)
    assert StragglerTolerated().judge(run, [run]).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_bound_that_none_can_keep_is_refused(ratio: float) -> None:
    """Noise alone breaks a ratio of 1."""
    with pytest.raises(ValueError, match="more than 1"):
        StragglerTolerated(ratio)


def test_steps_after_the_slow_process_died_are_not_slow(trainer: Any) -> None:
    """The slow rank was ended by step 18 and came back without the fault, whose time was not over yet: the clean steps
    of the next attempt do not make the mean better."""
    run, events = trainer(kills=[(18, 1)]).record(), list[Event]()
    ends = {e.step: e.mono_s for e in run.events if e.kind is Kind.STEP and (e.rank, e.attempt) == (1, 0)}
    for one in run.events:
        late_s = 0.1 * sum(one.mono_s > ends[step - 1] for step in range(FIRST, 18))
        at_s = ends[FIRST - 1] + 1e-5 if one.kind is Kind.APPLYING else one.mono_s + late_s
        events.append(replace(one, mono_s=at_s))
    back_s = max(e.mono_s for e in events if e.kind is Kind.STEP and (e.attempt, e.step) == (1, 12)) + 1e-5
    events.append(Event(Kind.ROLLED_BACK, "harness", 5001, 0.0, back_s, data={"fault": "kill", "verified": True}))
    fault = PlannedFault("kill", "straggle.sleep", "rank", Target((1,)), After(), {}, "", "", duration_s=20.0)
    slow = replace(run, events=tuple(sorted(events, key=lambda e: e.mono_s)), plan=replace(run.plan, faults=(fault,)))
    finding = StragglerTolerated(4.0).judge(slow, [trainer().record()])
    assert finding.outcome is Outcome.FAILED, finding.reason
