"""Check sums of parameters and moments: any bit changes them, and they add up over the ranks that share tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import pytest
import torch


@pytest.fixture
def sums(agent_module: Callable[[str], Any]) -> Any:
    """The module under test."""
    return agent_module("protocol.check_sums")


@dataclass
class Placement:
    replicate: bool

    def is_replicate(self) -> bool:
        return self.replicate


@dataclass
class Mesh:
    place: tuple[int, ...]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.place

    def size(self) -> int:
        return 4


@dataclass
class Part:
    """As a DTensor shows itself."""

    _local_tensor: torch.Tensor
    placements: tuple[Placement, ...]
    device_mesh: Mesh


def shards(sums: Any, tensors: list[torch.Tensor], ranks: int, copies: int = 1) -> list[str]:
    """What each of copies * ranks ranks reports that share the rows of these tensors."""
    told: list[str] = []
    for copy in range(copies):
        for rank in range(ranks):
            parts: list[tuple[int, Any]] = [
                (
                    place,
                    Part(torch.tensor_split(one, ranks)[rank], (Placement(True), Placement(False)), Mesh((copy, rank))),
                )
                for place, one in enumerate(tensors)
            ]
            told.append(sums.check_sum(torch, parts))
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_shares_of_any_number_of_ranks_add_up_to_the_whole(sums: Any, dtype: torch.dtype) -> None:
    """Seven rows on two, three or four ranks, and with hybrid sharding, have the check sum that one rank would have."""
    drawn = torch.Generator().manual_seed(0)
    tensors = [torch.randn(7, 3, generator=drawn).to(dtype), torch.randn(5, generator=drawn).to(dtype)]
    whole = sums.check_sum(torch, list(enumerate(tensors)))
    assert sums.is_whole(whole)
    assert sums.over_all([whole, whole]) == whole
    for ranks in (2, 3, 4):
        told = shards(sums, tensors, ranks)
        assert all(one.startswith(sums.SHARD) for one in told)
        assert sums.over_all(told) == whole
        hybrid = shards(sums, tensors, ranks, copies=2)
        assert sum(one.startswith(sums.COPY) for one in hybrid) == ranks
        assert sums.over_all(hybrid) == whole


def test_any_flipped_bit_changes_it_and_so_do_tensors_that_change_places(sums: Any) -> None:
    """Two tensors of one shape that are swapped keep the sum of their bits, and not their check sum."""
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    whole = sums.check_sum(torch, [(0, one), (1, other)])
    swapped = sums.check_sum(torch, [(0, other), (1, one)])
    assert swapped != whole
    assert sums.plain(swapped) == sums.plain(whole)
    for bit in range(32):
        flipped = one.clone()
        flipped.view(torch.int32)[2, 3] ^= (1 << bit) - (1 << 32) * (bit == 31)
        assert sums.check_sum(torch, [(0, flipped), (1, other)]) != whole


def test_what_does_not_add_up_is_not_added_up(sums: Any) -> None:
    """Replicas that differ, a rank that reported nothing, and whole tensors beside parts."""
    tensor = torch.randn(4, 4)
    part = Part(tensor[:2], (Placement(False),), Mesh((0,)))
    mixed = sums.check_sum(torch, [(0, tensor), (1, part)])
    assert mixed.startswith(sums.MIXED)
    assert sums.over_all([mixed, mixed]) is None
    assert sums.over_all(["0" * 16, "1" * 16]) is None
    assert sums.over_all(["0" * 16, None]) is None
    assert sums.over_all([]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_has_the_sum_of_its_bits(sums: Any, dtype: torch.dtype) -> None:
    """It is summed part by part, the last one shorter; also where it does not lie in one piece."""
    torch.manual_seed(0)
    large = torch.randn(300, 1001).to(dtype)
    word = torch.int32 if dtype is torch.float32 else torch.int16
    expected = int(large.view(word).to(torch.int64).sum()) % sums.MODULUS
    assert sums.plain(sums.check_sum(torch, [(0, large)])) == expected
    assert sums.plain_of_each(torch, [large, large.t()]) == [f"{expected:016x}"] * 2


class Placed(torch.Tensor):
    """A tensor of the CPU that counts as one of another device. Like torch, it refuses operations over devices."""

    place = "cpu"

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device(self.place)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to and isinstance(args[1], torch.device):
            return placed(args[0], str(args[1]))
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
        places = {each.place for each in given if isinstance(each, Placed)}
        if len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but got {places}")
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, Placed):
            result.place = places.pop()
        return result


def placed(tensor: torch.Tensor, place: str) -> torch.Tensor:
    found = tensor.as_subclass(torch.Tensor).detach().clone().as_subclass(Placed)
    found.place = place
    return found


def test_tensors_of_several_devices(sums: Any, agent_module: Callable[[str], Any]) -> None:
    """A rank may spread its model over two GPUs, or keep a part of it on the CPU. The sums are those of one device."""
    plain = [torch.arange(6.0), torch.ones(3), torch.full((2, 2), 0.5)]
    spread = [placed(tensor, place) for tensor, place in zip(plain, ("cuda:0", "cuda:1", "cpu"), strict=True)]
    assert sums.check_sum(torch, list(enumerate(spread))) == sums.check_sum(torch, list(enumerate(plain)))
    assert sums.plain_of_each(torch, spread) == sums.plain_of_each(torch, plain)
    norms = agent_module("agent.state.state_check_sums")._norms
    assert norms(torch, spread).tolist() == norms(torch, plain).tolist()
