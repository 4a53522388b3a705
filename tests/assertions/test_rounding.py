"""Rounding excuses a difference after a restart on three ranks or more, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from torchaos.harness.analysis.tolerance import ROUNDING, but_for_rounding, may_be_rounding, rounded_from, rounding

KILL = [(18, 1)]


@pytest.mark.parametrize(("world", "kills", "first"), [
    (3, KILL, 16), (4, KILL, 16), (2, KILL, None), (1, [(18, 0)], None), (3, [], None),
    (3, [(18, 1), (23, 0)], 16),
])  # fmt: skip
def test_the_first_step_that_may_differ(trainer: Any, world: int, kills: Any, first: int | None) -> None:
    """The one after the first resume, where there are three ranks or more; of two resumes the earlier one counts."""
    history = trainer(world=world, kills=kills).record().history
    assert rounded_from(history) == first
    steps = (1, (first or 16) - 1, first or 16, 30)
    expected = [0.0, 0.0, ROUNDING, ROUNDING] if first else [0.0] * 4
    assert [rounding(history, step) for step in steps] == expected
    assert rounding(history, None) == 0.0


def test_only_ranks_after_the_restart_count(trainer: Any) -> None:
    """A job that goes on with two ranks of four has one order of summation from then on."""
    assert rounded_from(trainer(world=4, kills=KILL, worlds={1: 2}).record().history) is None


def test_ranks_that_come_back_sum_in_another_order(trainer: Any) -> None:
    """Two ranks that were one for a while have the sums of one rank in their weights."""
    history = trainer(kills=[(18, 1), (23, 0)], worlds={1: 1, 2: 2}, global_batch=True).record().history
    assert rounded_from(history) == 21
    assert "another number of ranks sum" in but_for_rounding(1e-7, history)


def test_the_words_say_how_much_and_since_when(trainer: Any) -> None:
    """A reason names the largest difference and the first step that it may concern."""
    words = but_for_rounding(3.2e-7, trainer(world=3, kills=KILL).record().history)
    assert "at most 3e-07, from step 16 on" in words


def test_rounding_begins_with_the_restart(trainer: Any) -> None:
    """A difference in an earlier step is none, however small; nor is one where there are only two ranks."""
    many, two = (trainer(world=world, kills=KILL).record().history for world in (3, 2))
    assert may_be_rounding({10: 0.0, 16: 1e-7}, many) is True
    assert may_be_rounding({10: 1e-7, 16: 1e-7}, many) is None
    assert may_be_rounding({16: 1e-7}, two) is None
    assert may_be_rounding({16: 0.0}, two) is True
