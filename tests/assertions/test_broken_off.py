"""An exception that one rank raises in the middle of a step and the job catches, going back to a state in memory: the
other ranks may have finished that step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.assertions.parameter_digest import ParameterDigest
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.analysis.felt_evidence import broke_off
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

SEEN: dict[str, Any] = {"named": True, "state_seen": True, "loads_seen": False}


def _broken_off(trainer: Any, broken: frozenset[str] = frozenset()) -> tuple[Record, Record]:
    """A run in which rank 1 raises in step 18 and rank 0 finishes it, and its twin. Both go back to step 15."""
    run, twin = trainer(raises=(18, 1, 1.0), broken=broken, **SEEN).record(), trainer(**SEEN).record()
    (hit,) = run.of_kind(Kind.APPLYING)
    (due,) = [e for e in twin.events if (e.kind, e.rank, e.step) == (Kind.STEP, 0, 18)]
    done = replace(due, mono_s=hit.mono_s + 1e-3, source="rank0-a0", seq=9_999)

    def one_more(event: Event) -> Event:
        late = event.rank == 0 and event.mono_s > hit.mono_s and event.step is not None
        return replace(event, step=event.step + 1) if late and event.step is not None else event

    events = sorted([*map(one_more, run.events), done], key=lambda event: event.mono_s)
    return replace(run, events=tuple(events)), twin


def test_the_step_counts_on_each_rank(trainer: Any) -> None:
    """A rank that broke the step off counts one less than the others from there on. All steps have their global numbers
    nonetheless, and the going back shows that the fault was felt."""
    run, twin = _broken_off(trainer)
    assert not run.history.unplaced
    assert [part.base for part in run.history.segments] == [0, 15]
    assert run.history.last_step == 30
    for assertion in (LossContinuity, SampleAccounting, ParameterDigest, StateRestored, NoLostWork):
        found = assertion().judge(run, [twin])
        assert found.outcome is Outcome.PASSED, found.reason
    felt = broke_off(run, "raise")
    assert felt is not None
    assert "went on from step 15" in felt.what


def test_state_that_was_not_put_back_in_the_process_is_found(trainer: Any) -> None:
    """It went back to a state in memory, and a part of it was another one: the cause is told, and not that the fault
    itself or the job changed the numbers."""
    run, twin = _broken_off(trainer, frozenset({"momentum"}))
    found = StateRestored().judge(run, [twin])
    assert found.outcome is Outcome.FAILED, found.reason
    assert "with which the job went on after it had gone back to step 15 are not" in found.reason
    loss = LossContinuity().judge(run, [twin])
    assert loss.outcome is Outcome.FAILED
    assert "the optimizer's moments were not restored" in loss.reason, loss.reason
    assert "iterations were skipped" not in loss.reason


def test_samples_that_were_not_put_back_are_told_with_the_step(trainer: Any) -> None:
    """The job went back in the process, and not after a restart."""
    run, twin = _broken_off(trainer, frozenset({"sampler"}))
    reason = SampleAccounting().judge(run, [twin]).reason
    assert "after the job went back to step 15" in reason, reason
    assert "without any restart" not in reason


@pytest.mark.parametrize(("anew", "words"), [
    ({"dropped": 1}, "rank 0 cleared its gradients without an update in step 18"),
    ({"losses": [0.5, 0.25]}, "rank 0 made 2 backwards in step 18, and at most 1 in each step before"),
    ({}, ""),
])  # fmt: skip
@pytest.mark.parametrize("usual", [False, True])
def test_a_step_that_all_ranks_begin_anew_was_felt(
    trainer: Any, anew: dict[str, Any], words: str, usual: bool
) -> None:  # fmt: skip
    """The job catches the exception and makes the same step again. The agent of another rank must show it. In a job in
    which some earlier step was like this, too, it shows nothing."""
    run = trainer(**SEEN).record()
    if usual:
        run = replace(run, events=tuple(
            replace(event, data={**event.data, **anew}) if (event.kind, event.step) == (Kind.STEP, 7) else event
            for event in run.events
        ))  # fmt: skip
    (before,) = [e for e in run.events if (e.kind, e.rank, e.step) == (Kind.STEP, 1, 17)]
    hit = replace(before, kind=Kind.APPLYING, mono_s=before.mono_s + 1e-3, seq=9_998, data={
        "fault": "raise", "phase": "backward", "global_step": 18, "pid": 1001,
    })  # fmt: skip
    for rank in (0, 1):
        events = [
            replace(event, data={**event.data, **anew})
            if (event.kind, event.step) == (Kind.STEP, 18) and event.rank in (rank, 1) else event
            for event in (*run.events, hit)
        ]  # fmt: skip
        felt = broke_off(replace(run, events=tuple(sorted(events, key=lambda event: event.mono_s))), "raise")
        assert (felt.what if felt else "") == ("" if rank or usual else words)


def test_ranks_that_never_keep_step_are_left_alone(trainer: Any) -> None:
    """Without a fault on the rank that lacks a step, no step was broken off: it makes fewer of its own accord."""
    run, _twin = _broken_off(trainer)
    events = [event for event in run.events if event.kind is not Kind.APPLYING]
    assert replace(run, events=tuple(events)).history.uneven == (33, 32)
