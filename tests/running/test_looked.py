"""The facts about a trainer that a run without faults shows, for its first scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.running.scaffold.observed_run import chosen, chosen_in, saved_elsewhere, seen_in


def test_what_is_seen_and_what_it_is_worth(trainer: Any) -> None:
    """Each kind of evidence has a line; what was not seen takes the assertions that need it along, with the reason."""
    seen = {one.name: one for one in seen_in(trainer(steps=30, every=5, state_seen=True).record())}
    assert seen["steps"].words == "30 on 2 ranks, by the agent"
    assert seen["checkpoints"].words.startswith("6 saves, after steps 5, 10, 15, 20, 25 …")
    assert [one.name for one in seen.values() if one.blind] == []
    blind = {one.name: one.blind for one in seen_in(trainer(samples_seen=False, losses_seen=False).record())}
    assert (blind["samples"], blind["losses"]) == (("sample_accounting",), ("loss_continuity",))
    assert blind["parameters"] == ("state_restored", "parameter_digest")
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
    found = chosen_in(trainer(steps=steps, every=every).record())
    assert (found and found.step) == step


@pytest.mark.parametrize(("epoch", "step"), [(2, 12), (10, 17), (12, 17), (20, 27), (28, 12)])
def test_the_kill_lies_in_the_second_epoch(trainer: Any, epoch: int, step: int) -> None:
    """An epoch's order that is wrong after a resume shows only there. It stays in the first if no save follows."""
    found = chosen_in(trainer(steps=30, every=5, epoch=epoch).record())
    assert found
    assert found.step == step
    assert any("order of samples" in text for text in found.misses) is (epoch == 28)


def test_the_kill_comes_after_the_best_checkpoint() -> None:
    """A best value that a resume forgets shows only if no better one comes; and if that can't be, it is said."""
    last = [(step, "/job/last.pt") for step in range(5, 60, 5)]
    found = chosen(60, [*last, (35, "/job/best.pt"), (10, "/job/best.pt")], 2)
    assert found
    assert (found.step, found.says, found.misses) == (37, "in step 37, after the save of step 35", ())
    late = chosen(60, [*last, (59, "/job/model_Best.ckpt")], 2)
    assert late
    (said,) = late.misses
    assert said.startswith("model_Best.ckpt was last written after step 59, which comes later")


@pytest.mark.parametrize("other", [2, 3, 4, 5])
def test_the_kill_falls_on_no_save(other: int) -> None:
    """Nor on a step at which another family of files is saved, such as an average of the weights."""
    saves = [(at, f"/job/step-{at}.pt") for at in (10, 20)] + [(at, "/job/ema.pt") for at in range(other, 30, other)]
    found = chosen(30, saves, 9)
    assert found
    assert found.step > 10
    assert found.step % 10
    assert found.step % other
