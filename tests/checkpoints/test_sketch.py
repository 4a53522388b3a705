"""Sketches: the distance of two tensors is estimated when the tensors are gone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, distance
from torchaos.harness.checkpoints.inventory import take
from torchaos.harness.checkpoints.tensor_values import Sketch

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2"]


def _sketch(tensor: Any, part: int = 1 << 20) -> list[float]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    made = Sketch(dtype, tensor.element_size())
    for at in range(0, len(data), part):
        made.update(data[at : at + part])
    return made.numbers()


def _apart(one: Any, other: Any) -> float | None:
    ours, theirs = (
        Checkpoint("x", "torch", 1, None, True, True, None, {}, {}, sketches={"t": _sketch(tensor)})
        for tensor in (one, other)
    )
    return distance(ours, theirs, "t")


@pytest.mark.parametrize("size", [1, 17, 5_000, 200_000])
@pytest.mark.parametrize("off", [1e-6, 1e-3, 1.0])
def test_the_distance_is_estimated_from_a_few_sums(size: int, off: float) -> None:
    """Within a factor of three of the true one, for small tensors and large ones."""
    draw = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=draw, dtype=torch.float64)
    other = one + off * torch.randn(size, generator=draw, dtype=torch.float64)
    true = float((one - other).norm() / max(one.norm(), other.norm()))
    told = _apart(one, other)
    assert told is not None
    assert true / 3 <= told <= 3 * true


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_floating_point_type_has_a_size(dtype: str) -> None:
    """Zeros in the place of numbers are as far away as can be, and equal ones not at all."""
    one = torch.ones(3_000).to(getattr(torch, dtype))
    assert _apart(one, one) == 0.0
    told = _apart(one, torch.zeros(3_000).to(getattr(torch, dtype)))
    assert told is not None
    assert 1 / 3 < told < 3


def test_parts_that_change_places_are_far_apart() -> None:
    """Two tiles, two rows or two columns swapped keep every plain sum and the norm."""
    one = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    for length in (1, 1024, 65_536):
        other = one.clone()
        other[:length], other[length : 2 * length] = one[length : 2 * length], one[:length]
        told = _apart(one, other)
        assert told is not None
        assert told > float((one - other).norm() / one.norm()) / 3


def test_it_does_not_matter_in_which_parts_the_bytes_come() -> None:
    """Shards have any size."""
    one = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    assert _sketch(one, 1 << 20)[0] == _sketch(one, 100_003)[0]
    assert _sketch(one, 1 << 20)[1:] == pytest.approx(_sketch(one, 100_003)[1:], rel=1e-4)


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "int32", "uint8", "bool"])
def test_the_bits_are_those_of_the_check_sum_of_parameters(dtype: str) -> None:
    """The sum that the agent makes of a parameter after each step is the first number of its sketch."""
    from torchaos.harness.protocol.check_sums import as_integers

    tensor = torch.randn(777, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    assert _sketch(tensor)[0] == int(as_integers(torch, tensor).sum(dtype=torch.int64))


def test_what_has_no_size_says_so() -> None:
    """NaN and whole numbers have bits alone; numbers too large for the sum of their squares in float32 have a size."""
    assert len(_sketch(torch.tensor([1.0, math.nan]))) == len(_sketch(torch.tensor([1, 2]))) == 1
    assert _apart(torch.tensor([1, 2]), torch.tensor([1, 3])) is None
    assert _apart(torch.tensor([2e38, 1.0]), torch.tensor([-2e38, 1.0])) == pytest.approx(2.0)


def test_an_inventory_has_them(tmp_path: Path) -> None:
    """By the names of the tensors, whatever the layout on disk."""
    torch.save({"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.arange(3)}, tmp_path / "step-5.pt")
    sketches = take(tmp_path)["checkpoints"][0]["sketches"]
    assert sketches["a"] == _sketch(torch.arange(6.0).reshape(2, 3).t())
    assert len(sketches["b"]) == 1
