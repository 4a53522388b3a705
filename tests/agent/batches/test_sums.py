"""Sums of samples: all samples of a step are mixed at once, and the sum is that of splitmix64."""

from __future__ import annotations

import random
from typing import Any, Callable

import pytest

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """One number of the generator, as Steele et al. (2014) and Vigna's public C code give it."""
    z = state + 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_known_numbers(agent_module: Callable[[str], Any]) -> None:
    """The sum of one number is the first output of splitmix64, as published: 0xE220A8397B1DCDAF for the seed 0."""
    assert agent_module("protocol.check_sums").mixed_sum([0]) == splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 512, 513])
def test_the_sum_is_that_of_single_numbers(agent_module: Callable[[str], Any], count: int) -> None:
    """Numbers of any size, also negative ones, have the sum of their single mixed numbers."""
    draw = random.Random(count)
    numbers = [draw.randrange(-(2**70), 2**70) for _ in range(count)] + [0, MASK, -1, 2**64]
    assert agent_module("protocol.check_sums").mixed_sum(iter(numbers)) == sum(map(splitmix64, numbers)) & MASK


@pytest.mark.parametrize("count", [0, 1, 8, 512])
def test_the_order_does_not_matter(agent_module: Callable[[str], Any], count: int) -> None:
    """The sums of a step are those of its digests and indices, in any order."""
    sums, draw = agent_module("protocol.check_sums"), random.Random(count)
    digests = [draw.randbytes(6) for _ in range(count)]
    indices = [draw.randrange(2**40) for _ in range(count)]
    found = sums.sums_of(b"".join(digests), indices)
    mixed = [sum(map(splitmix64, own)) & MASK for own in ([int.from_bytes(one, "big") for one in digests], indices)]
    assert found == (count, mixed[0], count, mixed[1])
    assert sums.sums_of(b"".join(reversed(digests)), indices[::-1]) == found
    assert sums.sums_of(b"".join(digests), None) == (count, mixed[0], 0, 0)
