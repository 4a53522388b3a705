"""A job that skips other iterations than its twin, as with a loss scaler that lost its state, or in which another
optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.completed import Completed
from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.lr_continuity import LrContinuity
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.harness.protocol.wire import Event, Kind

KILL = [(18, 1)]
SKIPS = (
    "other iterations were skipped (made no optimizer step) than in the twin: in step 18 the LR schedule's counter "
    "went on by 1, and by 2 in the twin"
)


def _edited(record: Any, edit: Callable[[Event, int], dict[str, Any]]) -> Any:
    """The record with these entries in its steps. `edit` is given the event and its global step."""

    def of(event: Event) -> Event:
        step = (event.step or 0) + (15 if event.attempt else 0)
        return replace(event, data={**event.data, **edit(event, step)})

    events = [of(event) if event.kind is Kind.STEP else event for event in record.events]
    return replace(record, events=tuple(events))


def _twin(trainer: Any, seen: bool = True) -> Any:
    """It skipped an iteration between step 17 and 18."""
    return _edited(trainer().record(), lambda event, step: {"sched_step": (step - 1 + (step >= 18)) if seen else None})


def _run(trainer: Any, seen: bool = True, other: bool = True) -> Any:
    """It skipped none, and so consumed in step 18 what the twin consumed in no step."""

    def edit(event: Event, step: int) -> dict[str, Any]:
        late = {"losses": [9.0 + step], "samples": [f"{step:06x}{at:06x}" for at in range(8)], "indices": None}
        return {"sched_step": step - 1 if seen else None, **(late if event.attempt and step >= 18 and other else {})}

    return _edited(trainer(kills=KILL).record(), edit)


@pytest.mark.parametrize("assertion", [LossContinuity(), SampleAccounting()])
def test_other_skipped_iterations_are_the_cause(trainer: Any, assertion: Any) -> None:
    """The samples and the rates of later steps follow from it, and are no cause."""
    reason = assertion.judge(_run(trainer), [_twin(trainer)]).reason
    assert SKIPS in reason
    assert "the data: " not in reason
    assert "restored" not in reason
    assert "too often" not in reason


def test_a_job_that_goes_on_too_long_says_so_too(trainer: Any) -> None:
    """One iteration less was skipped, so one step more was made."""
    run = _run(trainer)
    finding = Completed(steps=29).judge(run, [_twin(trainer)])
    assert f"the job went on to step 30, 1 beyond 29: {SKIPS}" in finding.reason


@pytest.mark.parametrize(("seen", "other"), [(False, True), (True, False)], ids=["no counter", "the same samples"])
def test_what_was_not_seen_is_not_said(trainer: Any, seen: bool, other: bool) -> None:
    """Without the schedule's counter nothing shows the iterations; a schedule alone may be wrong by itself."""
    for assertion in (LossContinuity(), SampleAccounting(), Completed(steps=29)):
        assert "skipped (made" not in assertion.judge(_run(trainer, seen, other), [_twin(trainer, seen)]).reason


def _early(trainer: Any, shift: int = 2) -> Any:
    """It skipped two iterations before its first step, 16, and so consumed in step s what the twin did in s + 2."""

    def edit(event: Event, step: int) -> dict[str, Any]:
        first = (step - 1 + shift) * 8 + 4 * (event.rank or 0)
        own = list(range(first, first + 4))
        other = {"losses": [9.0 + step], "samples": [f"d{index}" for index in own], "indices": own}
        dropped = {"dropped": 2} if event.attempt and event.step == 1 else {}
        return {"sched_step": None, **dropped, **(other if event.attempt and shift else {})}

    return _edited(trainer(kills=KILL).record(), edit)


def test_iterations_that_are_skipped_before_the_first_step(trainer: Any) -> None:
    """Gradients that were cleared without a step show it, also if no schedule counts."""
    run, twin = _early(trainer), _twin(trainer, seen=False)
    told = "(made no optimizer step) than in the twin: 2 before step 16, and 0 in the twin"
    for assertion in (LossContinuity(), SampleAccounting(), Completed(steps=29)):
        reason = assertion.judge(run, [twin]).reason
        assert told in reason
        assert "the data: " not in reason
        assert "too often" not in reason


def test_iterations_that_only_the_twin_skipped(trainer: Any) -> None:
    """The run trained on what the twin skipped, so these samples are in no step of the twin, and then went on with what
    the twin consumed one step earlier. If it went on with other samples, nothing shows that the iterations differ."""

    def edit(event: Event, step: int) -> dict[str, Any]:
        return {"sched_step": None, **({"dropped": 1} if step == 18 else {})}

    def late(event: Event, step: int) -> dict[str, Any]:
        first = (step - 2) * 8 + 4 * (event.rank or 0)
        own = list(range(first, first + 4))
        return {"samples": [f"d{at}" for at in own], "indices": own} if event.attempt and step > 18 else {}

    run, twin = _run(trainer, seen=False), _edited(trainer().record(), edit)
    told = "than in the twin: 0 before step 18, and 1 in the twin"
    assert told in SampleAccounting().judge(_edited(run, late), [twin]).reason
    assert "skipped (made" not in SampleAccounting().judge(run, [twin]).reason


@pytest.mark.parametrize("shift", [0, -3])
def test_gradients_that_a_warm_up_clears(trainer: Any, shift: int) -> None:
    """They skip no iteration: the samples stay, or are others than those of the skipped iterations."""
    run, twin = _early(trainer, shift), _twin(trainer, seen=False)
    for assertion in (LossContinuity(), SampleAccounting(), Completed(steps=29)):
        assert "skipped (made" not in assertion.judge(run, [twin]).reason
    assert ("rewound" in SampleAccounting().judge(run, [twin]).reason) is bool(shift)


def test_gradients_that_one_rank_alone_clears(trainer: Any) -> None:
    """A rank that raised an exception clears its gradients, and the others made the step: no iteration was skipped."""

    def edit(event: Event, step: int) -> dict[str, Any]:
        resumed = event.attempt == 1
        cleared = {"dropped": 1} if resumed and event.step == 1 and event.rank == 1 else {}
        return {"sched_step": None, **({"losses": [9.0 + step]} if resumed else {}), **cleared}

    run, twin = _edited(trainer(kills=KILL).record(), edit), _twin(trainer, seen=False)
    assert "skipped (made" not in LossContinuity().judge(run, [twin]).reason


def test_skips_that_come_after_a_difference_are_not_its_cause(trainer: Any) -> None:
    """They may follow from it."""
    run, twin = _run(trainer), _twin(trainer)
    late = _edited(run, lambda event, step: {"losses": [5.0]} if event.attempt and step == 17 else {})
    assert "skipped (made" not in LossContinuity().judge(late, [twin]).reason


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("shift", "told"), [(1, True), (0, False)])
def test_optimizers_that_take_other_turns(trainer: Any, shift: int, told: bool, scheduled: bool) -> None:
    """As in a GAN whose count of critic updates is lost: in step 18 the generator is due, and the critic steps. It
    consumes other samples, and a step of other sizes is no other batch size. A counter alone shows no turn. If the
    optimizers step unequally often, their counters are told as a sum, and those of their schedules show it."""

    def turns(due: Callable[[int], bool]) -> Callable[[Event, int], dict[str, Any]]:
        counts = [0, 0]
        after = {}
        for step in range(1, 31):
            counts[due(step)] += 1
            after[step] = counts[due(step)], due(step)

        def edit(event: Event, step: int) -> dict[str, Any]:
            count, second = after[step]
            own = list(event.data["samples"])[: 2 if second and shift else 4]
            samples = [f"{sample}{second * shift}" for sample in own]
            other = {"samples": samples, "losses": [9.0 * second + step]}
            counters = (step, count) if scheduled else (count, None)
            return {**dict(zip(("opt_step", "sched_step"), counters, strict=True)), "indices": None, **other}

        return edit

    run = _edited(trainer(kills=KILL).record(), turns(lambda step: (step % 3 == 0 and step != 18) or step == 19))
    twin = _edited(trainer().record(), turns(lambda step: step % 3 == 0))
    counter = "LR schedule" if scheduled else "counter"
    claim = (
        f"the optimizers take turns, and another one stepped than in the twin: the {counter} of the one that made step "
    )
    for assertion in (LossContinuity(), SampleAccounting()):
        reason = assertion.judge(run, [twin]).reason
        assert (f"{claim}18 stood at 13 after it, and at 6 in the twin" in reason) is told
        assert "the data: " not in reason
        assert "global batch changed" not in reason


def test_an_iteration_that_the_run_skips_one_later_than_the_twin(trainer: Any) -> None:
    """A loss scale that grows one iteration late overflows one iteration late. The samples are drawn again and again,
    so some samples of the iteration that the twin skipped are in other steps of the twin; the later steps agree."""

    def made(kills: Any, skipped: int) -> Any:
        def edit(event: Event, step: int) -> dict[str, Any]:
            iteration = step + (step >= skipped)
            rank = event.rank or 0
            own = [(iteration + 1) * 4 + rank, 500 + iteration // 2]
            return {
                "sched_step": None, "losses": [float(iteration)], "samples": [f"d{index}" for index in own],
                "indices": own, **({"dropped": 1} if step == skipped else {}),
            }  # fmt: skip

        return _edited(trainer(kills=kills).record(), edit)

    run, twin = made(KILL, 19), made((), 18)
    told = "than in the twin: 0 before step 18, and 1 in the twin"
    for assertion in (SampleAccounting(), LossContinuity()):
        assert told in (reason := assertion.judge(run, [twin]).reason), reason


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (False, "was skipped in the twin, as a loss scaler skips it, and not"),
        (True, "was skipped, as a loss scaler skips it, and not in the twin"),
    ],
)
def test_an_update_that_only_one_of_them_skips(trainer: Any, here: bool, told: str) -> None:
    """A loss scaler whose count was not restored skips another update than the twin's. The schedule then goes on in
    another step, which follows from it."""

    def made(kills: Any, skipped: int) -> Any:
        def edit(event: Event, step: int) -> dict[str, Any]:
            done, before = step - (step >= skipped), step - 1 - (step > skipped)
            late = {"losses": [9.0 + step]} if kills and step >= 20 else {}
            return {
                "opt_step": done, "sched_step": before, "lr": [0.1 / (1 + before)], "skipped": step == skipped, **late,
            }  # fmt: skip

        return _edited(trainer(kills=kills).record(), edit)

    run, twin = (made(KILL, 19), made((), 21)) if here else (made(KILL, 21), made((), 19))
    for assertion in (LossContinuity(), LrContinuity()):
        reason = assertion.judge(run, [twin]).reason
        assert f"he update of step 19 {told}" in reason, reason
        assert "schedule" not in reason
