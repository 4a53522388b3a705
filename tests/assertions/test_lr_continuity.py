"""lr_continuity: a schedule that continues passes, and for any other the finding says how it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.lr_continuity import LrContinuity
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Kind

KILL = [(18, 1)]


def _rate(step: int) -> float:
    """The builder's schedule."""
    return 0.1 * (1 - (step - 1) / 60)


def _times(by: float) -> Callable[[int], float]:
    return lambda step: _rate(step) * by


def _with_rates(run: Any, rate: Callable[[int], float], base: int = 15) -> Any:
    """The record with other learning rates after the resume."""
    events = [
        replace(e, data={**e.data, "lr": [rate(base + (e.step or 0))]}) if e.kind is Kind.STEP and e.attempt == 1 else e
        for e in run.events
    ]
    return replace(run, events=tuple(events))


def test_a_schedule_that_goes_on_passes(trainer: Any) -> None:
    """With a kill, with three, and on fewer ranks."""
    twin = trainer().record()
    assert isinstance(LrContinuity(), Assertion)
    for how in ({"kills": KILL}, {"kills": [(18, 1), (16, 0), (23, 1)]}, {"kills": KILL, "worlds": {1: 1}}):
        finding = LrContinuity().judge(trainer(**how).record(), [twin])
        assert finding.outcome is Outcome.PASSED, finding.reason
        assert finding.measured["steps"] == 30


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (lambda step: _rate(step - 15), "The rates are the twin's from step 1 on, after the resume from step 15"),
        (lambda step: _rate(step + 1), "The schedule is one step ahead, as if it made steps while it was restored"),
        (lambda step: _rate(step - 1), "The schedule is one step behind, as if saved before its own step"),
        (lambda step: _rate(step + 3), "The schedule is 3 steps ahead"),
        (lambda step: 0.1, "It stays at 0.1 after the resume from step 15: the job no longer follows the schedule"),
        (lambda step: _rate(step) * 1.5, "the counter of the LR schedule is the twin's: most likely, the optimizer's"),
    ],
    ids=["again", "ahead", "behind", "far ahead", "constant", "other"],
)
def test_how_it_is_off_is_told(trainer: Any, rate: Callable[[int], float], words: str) -> None:
    """The first step and rank, both rates, and which steps' rates they are."""
    run = _with_rates(trainer(kills=KILL).record(), rate)
    finding = LrContinuity().judge(run, [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert "differs first in step 16 on rank 0" in finding.reason
    assert words in finding.reason


@pytest.mark.parametrize(
    ("falls", "words"),
    [
        ((31,), "In that step the twin's rate changed, and the job's did not, after the resume from step 15"),
        ((28,), "The schedule is 8 steps behind, after the resume"),
        ((19,), "The schedule is one step ahead"),
        ((17, 20), "No shift of the twin's rates explains the rates"),
    ],
    ids=["never", "later", "earlier", "twice"],
)
def test_a_schedule_in_stages_is_told_by_its_changes(trainer: Any, falls: tuple[int, ...], words: str) -> None:
    """A rate that stays the same for a while, as a plateau's, is the twin's of many steps: no number of steps is
    claimed before the rate changes. The twin's falls in step 20."""

    def staged(run: Any, falls: tuple[int, ...]) -> Any:
        events = []
        for event in run.events:
            if event.kind is Kind.STEP:
                step = (event.step or 0) + 15 * (event.attempt or 0)
                lr = 0.1 * 0.5 ** sum(fall <= step for fall in (falls if event.attempt else (20,)))
                event = replace(event, data={**event.data, "lr": [lr]})
            events.append(event)
        return replace(run, events=tuple(events))

    run, twin = staged(trainer(kills=KILL).record(), falls), staged(trainer().record(), ())
    finding = LrContinuity().judge(run, [twin])
    assert (finding.outcome, words in finding.reason) == (Outcome.FAILED, True), finding.reason


def test_a_schedule_that_follows_the_loss_gets_the_twins_own_spread(trainer: Any) -> None:
    """Where the twins' rates differ among themselves, as much is allowed to the run; far beyond it is failed, and what
    lies between may be chance."""
    twins = [_with_rates(trainer(kills=KILL).record(), _times(by)) for by in (1.0, 1.001)]
    near = _with_rates(trainer(kills=KILL).record(), _times(1.002))
    far = _with_rates(trainer(kills=KILL).record(), _times(1.05))
    assert LrContinuity().judge(near, twins).outcome is Outcome.PASSED
    assert LrContinuity().judge(far, twins).outcome is Outcome.FAILED
    between = LrContinuity().judge(_with_rates(trainer(kills=KILL).record(), _times(1.006)), twins)
    assert (between.outcome, "a defect, or chance" in between.reason) == (Outcome.INCONCLUSIVE, True), between.reason
    assert LrContinuity(tolerance=0.06).judge(far, twins[:1]).outcome is Outcome.PASSED


def test_without_a_twin_steps_done_again_are_compared(trainer: Any) -> None:
    """And a job that did none twice is inconclusive."""
    assert LrContinuity().judge(trainer(kills=KILL).record(), []).outcome is Outcome.PASSED
    again = LrContinuity().judge(_with_rates(trainer(kills=KILL).record(), lambda step: _rate(step - 15)), [])
    assert (again.outcome, "the first time" in again.reason) == (Outcome.FAILED, True)
    assert LrContinuity().judge(trainer().record(), []).outcome is Outcome.INCONCLUSIVE


def test_what_is_no_measure_or_unseen_is_inconclusive(trainer: Any) -> None:
    """A twin with other rates before the fault, and a job that shows none."""
    other = trainer(steps=40).record()
    before = LrContinuity().judge(trainer(kills=KILL).record(), [other])
    assert (before.outcome, "before any fault" in before.reason) == (Outcome.INCONCLUSIVE, True)
    run = trainer(kills=KILL).record()
    blind = replace(run, events=tuple(
        replace(e, data={**e.data, "lr": []}) if e.kind is Kind.STEP else e for e in run.events
    ))  # fmt: skip
    assert LrContinuity().judge(blind, [trainer().record()]).outcome is Outcome.INCONCLUSIVE
    assert LrContinuity().judge(run, [blind]).outcome is Outcome.INCONCLUSIVE


def test_steps_that_were_not_seen_decide_nothing(trainer: Any) -> None:
    """Neither those of rank 1 after the resume, nor those of all ranks: the twin's rates may not be theirs."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    for unseen, words in (({1}, "step 16"), ({0, 1}, "ends with step 17, and the twin's with step 30")):
        events = tuple(e for e in run.events if e.kind is not Kind.STEP or e.attempt == 0 or e.rank not in unseen)
        finding = LrContinuity().judge(replace(run, events=events), [twin])
        assert (finding.outcome, words in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


def test_twins_whose_rates_are_far_apart_excuse_nothing(trainer: Any) -> None:
    """A schedule that fell early in one twin makes no tolerance for a run that lost its own: too noisy."""
    twins = [_with_rates(trainer(kills=KILL).record(), _times(by)) for by in (1.0, 0.5, 0.8)]
    finding = LrContinuity().judge(_with_rates(trainer(kills=KILL).record(), _times(0.7)), twins)
    assert (finding.outcome, "too noisy to judge" in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


def test_noise_after_the_fault_is_no_excuse_before_it(trainer: Any) -> None:
    """The twins agree up to step 15; a run that has other rates in its first steps is not the same job."""
    twins = [_with_rates(trainer(kills=KILL).record(), _times(by)) for by in (1.0, 1.002, 1.001)]
    events = tuple(
        replace(e, data={**e.data, "lr": [_rate(e.step or 0) * 1.001]}) if e.kind is Kind.STEP and e.attempt == 0 else e
        for e in trainer(kills=KILL).record().events
    )
    finding = LrContinuity().judge(replace(trainer(kills=KILL).record(), events=events), twins)
    assert (finding.outcome, "before any fault" in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


@pytest.mark.parametrize("rates", [[], [0.1, 0.1], [0.1, None]], ids=["none", "one more", "one unknown"])
def test_another_number_of_groups_can_not_be_judged(trainer: Any, rates: list[float | None]) -> None:
    """Steps in which other optimizers take part, as a GAN's whose count begins anew: it says so, and does not crash."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    for ours, theirs in ((rates, [0.1]), ([0.1], rates), (rates, rates)):
        changed = [
            replace(one, events=tuple(
                replace(e, data={**e.data, "lr": lr}) if e.kind is Kind.STEP and e.attempt == attempt else e
                for e in one.events
            )) for one, lr, attempt in ((run, ours, 1), (twin, theirs, 0))
        ]  # fmt: skip
        finding = LrContinuity().judge(changed[0], changed[1:])
        assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_ranks_with_other_numbers_of_steps_are_not_failed(trainer: Any) -> None:
    """Uneven inputs under Join: in the twin too rank 1 makes fewer steps, so a difference says nothing of a defect."""
    twin = trainer().record()
    uneven = replace(twin, events=tuple(
        e for e in twin.events if not (e.kind is Kind.STEP and e.rank == 1 and (e.step or 0) > 25)
    ))  # fmt: skip
    run = _with_rates(trainer(kills=KILL).record(), _times(0.5))
    assert LrContinuity().judge(run, [twin]).outcome is Outcome.FAILED
    finding = LrContinuity().judge(run, [uneven])
    assert (finding.outcome, "different numbers of steps" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    assert finding.reason.startswith("the learning rate")


def test_other_rates_that_begin_later_are_of_the_schedule(trainer: Any) -> None:
    """The first rate after the resume was right, so the optimizer's rate was restored."""
    run = _with_rates(trainer(kills=KILL).record(), lambda step: _rate(step) * (1 + (step > 17) / 2))
    reason = LrContinuity().judge(run, [trainer().record()]).reason
    assert "explains the rates after the resume from step 15: most likely the schedule was not restored." in reason
