"""Steps of which an attempt did only the rest, as after a save in the middle of an accumulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchaos.harness.analysis.comparison.agreement import with_first_parts
from torchaos.harness.record.history import Attempt, Execution, Executions, History

TWIN = tuple(
    Execution(0, 0, step, float(step), step, (1.0, 2.0, step / 8), ("a", "b", str(step)), (1, 2, step), parameters="p")
    for step in range(1, 6)
)


def history(*executions: Execution) -> History:
    attempts = (Attempt(0, 0, {}, 0.0, None, 1, 0), Attempt(1, 0, {}, 3.5, None, 1, 2))
    return History(attempts, Executions.of(executions), (), (), "agent")


def resumed(**first: object) -> History:
    """Attempt 1 goes on in the midst of step 3."""
    rest = replace(TWIN[2], losses=TWIN[2].losses[1:], samples=TWIN[2].samples[1:], indices=TWIN[2].indices[1:])
    own = [replace(rest, **first), *TWIN[3:]]  # type: ignore[arg-type]
    return history(*TWIN[:3], *(replace(one, attempt=1, local_step=one.local_step - 2) for one in own))


def is_whole(run: History) -> bool:
    third = with_first_parts(run, history(*TWIN)).by_step()[3][0]
    return (third.losses, third.samples, third.indices) == (TWIN[2].losses, TWIN[2].samples, TWIN[2].indices)


def test_the_rest_of_a_step_is_the_step() -> None:
    """The first step after the resume has the last losses and samples of the twin's, and leads to the same parameters:
    the first ones were in the gradients that the checkpoint holds."""
    assert is_whole(resumed())


@pytest.mark.parametrize(
    "first",
    [{"parameters": "q"}, {"losses": (2.5, 3 / 8)}, {"samples": ("c", "3")}, {"indices": (1, 3)}, {"losses": ()}],
    ids=["other parameters", "another loss", "another sample", "another index", "no loss"],
)
def test_what_is_not_the_rest(first: dict[str, object]) -> None:
    """A step that leads elsewhere has lost its first gradients; another loss or sample is no rest of a step."""
    assert not is_whole(resumed(**first))


@pytest.mark.parametrize(("next_loss", "whole"), [(4 / 8, True), (0.7, False)])
def test_without_parameters_the_next_step_decides(next_loss: float, whole: bool) -> None:
    """Where no parameters were seen, the losses of the step after show whether the first gradients were there."""
    run = resumed(parameters=None)
    later = [
        replace(one, losses=(1.0, 2.0, next_loss)) if one.attempt and one.global_step == 4 else one
        for one in run.executions
    ]
    assert is_whole(replace(run, executions=Executions.of(later))) is whole


def test_only_the_first_step_of_a_resume() -> None:
    """A step in the midst of an attempt has nothing to go on with: a job that leaves batches out is not excused."""
    run = resumed()
    cut = [
        replace(one, losses=one.losses[1:], samples=one.samples[1:], indices=one.indices[1:])
        if one.attempt and one.global_step == 4
        else one
        for one in run.executions
    ]
    found = with_first_parts(replace(run, executions=Executions.of(cut)), history(*TWIN)).by_step()
    assert len(found[4][0].losses) == 2
