"""The facts about a trainer that a run without faults shows, for its first scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.running.drafting.seen import kill_step, saved_elsewhere, seen_in


def test_what_is_seen_and_what_it_is_worth(trainer: Any) -> None:
    """Each kind of evidence has a line; what was not seen takes the assertions that need it along, with the reason."""
    seen = {one.name: one for one in seen_in(trainer(steps=30, every=5, state_seen=True).record())}
    assert seen["steps"].words == "30 on 2 ranks, by the agent"
    assert seen["checkpoints"].words.startswith("6 saves, after steps 5, 10, 15, 20, 25 …")
    assert [one.name for one in seen.values() if one.blind] == []
    blind = {one.name: one.blind for one in seen_in(trainer(samples_seen=False, losses_seen=False).record())}
    assert (blind["samples"], blind["losses"]) == (("sample_accounting",), ("loss_continuity",))
    assert blind["parameters"] == ("state_restored",)
    nothing = list(seen_in(replace(trainer().record(), events=())))
    assert [(one.name, "recovery_time" in one.blind) for one in nothing] == [("steps", True)]


def test_checkpoints_in_another_folder_are_told(trainer: Any) -> None:
    """The job would resume from those of an earlier run; nothing is said if they are where the scenario says."""
    run = trainer().record()
    there = replace(run, plan=replace(run.plan, job=replace(run.plan.job, checkpoints="{run}/checkpoints")))
    assert saved_elsewhere(there) == ""
    other = replace(run, plan=replace(run.plan, job=replace(run.plan.job, checkpoints="{run}/out")))
    assert saved_elsewhere(other) == (
        "they were saved to /job/checkpoints, not below {run}/out: the next run would resume from them"
    )
    assert ("checkpoint files", ("checkpoint_integrity",)) in [(one.name, one.blind) for one in seen_in(other)]


@pytest.mark.parametrize(
    ("steps", "every", "step"), [(30, 5, 12), (30, 10, 25), (30, 20, 25), (30, 100, 16), (4, 1, 3), (2, 1, None)]
)
def test_the_kill_lies_between_two_checkpoints(trainer: Any, steps: int, every: int, step: int | None) -> None:
    """After the second checkpoint, where there are two; never on the last step, where nothing would follow."""
    assert kill_step(trainer(steps=steps, every=every).record()) == step


@pytest.mark.parametrize(("epoch", "step"), [(2, 12), (10, 17), (12, 17), (20, 27), (28, 12)])
def test_the_kill_lies_in_the_second_epoch(trainer: Any, epoch: int, step: int) -> None:
    """An epoch's order that is wrong after a resume shows only there. It stays in the first if no save follows."""
    assert kill_step(trainer(steps=30, every=5, epoch=epoch).record()) == step
