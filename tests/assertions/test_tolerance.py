"""The tolerance that is learned from twins: for each step, above a floor, below a cap, from finite values, and from
early steps alone where early steps are judged."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from torchaos.harness.analysis.tolerance import (
    CAP,
    CERTAIN,
    LEARNED_FACTOR,
    LOSS,
    NEAR,
    WEIGHTS,
    Tolerance,
    Tolerances,
    certainly_beyond,
    distances,
    learned,
    relative,
)
from torchaos.harness.record.history import Execution


def _run(losses: list[float], **more: Any) -> dict[int, dict[int, Execution]]:
    """The steps of one rank, from 1."""
    return {step: {0: Execution(0, 0, step, 0.0, step, (loss,), **more)} for step, loss in enumerate(losses, 1)}


def _with(losses: list[float], step: int, loss: float) -> dict[int, dict[int, Execution]]:
    return _run([loss if place == step else one for place, one in enumerate(losses, 1)])


FLAT = [2.0] * 30


def test_equal_twins_leave_no_room() -> None:
    """Bits must be equal where those of the twins are, and one twin alone teaches nothing."""
    for twins in ([_run(FLAT)], [_run(FLAT)] * 3):
        limit = learned(twins, LOSS)
        assert (limit.basis, limit.allowed(5), limit.largest) == ("bitwise", 0.0, 0.0)
        assert limit.judges(5)


def test_a_difference_counts_in_its_step_and_near_it() -> None:
    """Twins that differ in step 10 say little of step 20: the tolerance is that of each step, and its neighbours'."""
    limit = learned([_run(FLAT), _with(FLAT, 10, 2.002)], LOSS)
    wide = {step for step in range(1, 31) if limit.allowed(step) > 1e-4}
    assert wide == set(range(10 - NEAR, 10 + NEAR + 1))
    assert limit.allowed(10) == pytest.approx(LEARNED_FACTOR * 0.002 / 2.002)
    assert limit.allowed(20) == pytest.approx(LEARNED_FACTOR * LOSS.floor)
    assert limit.allowed(10, CERTAIN) == pytest.approx(CERTAIN * 0.002 / 2.002)
    assert limit.allowed(31) == math.inf
    assert not limit.judges(31)


def test_the_largest_of_all_pairs_counts() -> None:
    """Of three twins the two that are farthest from each other, whichever they are."""
    values = [(2.0, 2.0, 2.002), (2.0, 2.002, 2.0), (2.002, 2.0, 2.0), (2.001, 2.0, 2.002)]
    for trio in values:
        assert learned([_with(FLAT, 5, one) for one in trio], LOSS).spreads[5] == pytest.approx(0.002 / 2.002)


def test_a_loss_that_crosses_zero_learns_no_huge_tolerance() -> None:
    """Near zero the size that counts is the typical one of the run: 2e-5 from -1e-5 is no difference of 200 %."""
    line = [(15 - step) / 10 for step in range(30)]
    near = [1e-5 if value == 0 else value for value in line]
    other = [-1e-5 if value == 0 else value for value in line]
    limit = learned([_run(near), _run(other)], LOSS)
    assert 0 < limit.largest < 1e-4
    assert all(limit.judges(step) for step in range(1, 31))
    assert relative(near[15], other[15]) > 1


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_teach_nothing(odd: float) -> None:
    """A NaN in one twin: that step can't be judged, and no other step gets a larger tolerance of it."""
    limit = learned([_run(FLAT), _with(FLAT, 10, odd), _run(FLAT)], LOSS)
    assert not limit.judges(10)
    assert all(limit.allowed(step) == pytest.approx(LEARNED_FACTOR * LOSS.floor) for step in range(1, 31) if step != 10)
    assert math.isfinite(limit.largest)


def test_equal_nans_are_equal() -> None:
    """A NaN that all twins have in the same step is what they compute."""
    assert learned([_with(FLAT, 10, math.nan)] * 2, LOSS).basis == "bitwise"


def test_beyond_the_cap_nothing_is_judged() -> None:
    """Three times the spread may be at most one per cent."""
    for spread, judged in ((0.9 * CAP / LEARNED_FACTOR, True), (1.1 * CAP / LEARNED_FACTOR, False), (0.5, False)):
        limit = learned([_run(FLAT), _with(FLAT, 10, 2.0 * (1 - spread))], LOSS)
        assert limit.judges(10) is judged
        assert limit.largest <= CAP


def test_what_comes_later_teaches_nothing_of_what_was_before() -> None:
    """Noise of step 10 and later is no excuse for steps up to 9, not even for the last of them."""
    noisy = _run([2.0] * 9 + [2.01] * 21)
    early = learned([_run(FLAT), noisy], LOSS, last=9)
    assert all(early.allowed(step) == pytest.approx(LEARNED_FACTOR * LOSS.floor) for step in range(1, 10))
    assert learned([_run(FLAT), noisy], LOSS).allowed(9) > 1e-3
    assert Tolerances.learned([_run(FLAT), noisy], 9).loss == early


def test_losses_teach_nothing_of_learning_rates() -> None:
    """Each quantity has its own tolerance: a noisy loss excuses no schedule."""
    limits = Tolerances.learned([_run(FLAT, lr=(0.1,)), _run([2.1] * 30, lr=(0.1,))])
    assert limits.loss.allowed(5) > 0.01
    assert limits.rate.allowed(5) == pytest.approx(1e-9)


def test_a_run_is_measured_from_the_nearest_twin() -> None:
    """Not from the first, and not from the farthest; only steps that all have are measured."""
    twins = [_run(FLAT), _run([2.2] * 30), _run([3.0] * 20)]
    far = distances(_run([2.21] * 30), twins, LOSS, 0.0)
    assert set(far) == set(range(1, 21))
    assert far[1] == pytest.approx(0.01 / 2.21)


@pytest.mark.parametrize(("far", "first"), [
    ({}, None),
    ({10: 1.0}, None),
    ({10: 1.0, 11: 1.0}, None),
    ({10: 1.0, 11: 1.0, 12: 1.0}, None),
    ({29: 1.0, 30: 1.0}, None),
    (dict.fromkeys(range(10, 31), 1.0), 10),
    (dict.fromkeys(range(28, 31), 1.0), 28),
    (dict.fromkeys(range(10, 31), 0.005), None),
    ({step: 1.0 if step in (10, 15, 20) else 5e-3 for step in range(10, 31)}, 10),
], ids=["none", "a spike", "two", "three", "last two", "all", "last three", "between", "mixed"])  # fmt: skip
def test_beyond_noise_is_what_lasts(far: dict[int, float], first: int | None) -> None:
    """A spike is not, nor what may be chance: several steps far beyond the twins, and at least half beyond what is
    allowed from there on."""
    limit = Tolerance("learned", 0.0, 1.0, dict.fromkeys(range(1, 31), 1e-3))
    assert certainly_beyond({step: far.get(step, 0.0) for step in range(1, 31)}, limit) == first


def test_healthy_noise_is_never_beyond() -> None:
    """Of 300 made-up jobs, each with three twins and noise of its own that grows, none is certainly beyond."""
    draw = random.Random(0)
    for number in range(300):
        size, growth = 10 ** draw.uniform(-7, -3), draw.choice((1.0, 1.1, 1.3))
        runs = [
            _run([2.0 * (1 + draw.gauss(0, size * growth**step)) for step in range(30)]) for _ in range(4)
        ]  # fmt: skip
        limit = learned(runs[1:], LOSS)
        assert certainly_beyond(distances(runs[0], runs[1:], LOSS, limit.typical), limit) is None, number


def test_a_sketch_tells_how_far_apart_parameters_are() -> None:
    """The norm of the difference, relative to the norm, within a factor of three; equal ones are not apart."""
    draw = random.Random(1)
    for size in (1e-8, 1e-3, 1.0):
        weights = [draw.gauss(0, 1) for _ in range(200)]
        moved = [one + size * draw.gauss(0, 1) for one in weights]
        signs = [[draw.choice((-1, 1)) for _ in weights] for _ in range(8)]
        mine, other = (
            (math.hypot(*values), *(sum(s * one for s, one in zip(row, values, strict=True)) for row in signs))
            for values in (weights, moved)
        )
        expected = math.dist(weights, moved) / max(mine[0], other[0])
        assert expected / 3 < WEIGHTS.apart(mine, other, 0.0) < expected * 3
        assert WEIGHTS.apart(mine, mine, 0.0) == 0.0
    assert WEIGHTS.apart(mine, (mine[0], math.nan, *other[2:]), 0.0) == math.inf
    assert WEIGHTS.apart((), mine, 0.0) == math.inf


def test_what_was_not_seen_is_left_out_and_what_is_one_more_is_infinitely_far() -> None:
    """Values are compared in pairs, and a sketch of one sum is one."""
    assert LOSS.apart((None,), (0.5,), 1.0) == 0.0
    assert LOSS.apart((), (), 1.0) == 0.0
    assert LOSS.apart((1.0,), (), 1.0) == math.inf
    assert WEIGHTS.apart((2.0, -1.0), (2.0, -1.5), 0.0) == pytest.approx(0.25)
    assert WEIGHTS.apart((2.0,), (3.0,), 0.0) == math.inf
