"""A check sum of tensors that adds up over the ranks that share them, whatever their number.

It is two sums of the tensors' bits, read as integers, modulo 2**64: in one of them each tensor has a factor of its own,
the other is plain. So any one flipped bit changes it, and so do two tensors that change places. Elements that change
places within one tensor do not. The plain sum is the same for the tensors of a checkpoint, whatever their order there.

Four kinds, by a word before the 32 hexadecimal digits:
- none: every tensor is whole here, as under DDP
- SHARD: parts of tensors, or some of them; the sum over the ranks is that of the whole tensors
- COPY: parts that another rank has as well (hybrid sharding), which count once
- MIXED: whole tensors and parts; no sum over the ranks means anything
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHARD, COPY, MIXED = "shard-", "copy-", "mixed-"
MODULUS, _DIGITS = 1 << 64, 16
_PART = 1 << 16  # elements


def check_sum(torch: Any, tensors: Sequence[tuple[int, Any]]) -> str:
    """Of (place, tensor) pairs: the place, from 0, tells which tensor it is. Computed where the tensors are."""
    if not tensors:
        return _written(0, 0)
    parts = [local(tensor) for _place, tensor in tensors]
    with torch.no_grad():
        sums = torch.stack([_sum_of_bits(torch, part) for part in parts]).tolist()
    ordered = sum(_factor(place) * one for (place, _tensor), one in zip(tensors, sums, strict=True))
    return _kind([tensor for _place, tensor in tensors]) + _written(ordered, sum(sums))


def plain_of_each(torch: Any, tensors: Sequence[Any]) -> list[str]:
    """The kind and the plain sum of each tensor by itself, as 16 hexadecimal digits."""
    with torch.no_grad():
        sums = [_sum_of_bits(torch, local(tensor)) for tensor in tensors]
        devices = {one.device: torch.stack([each for each in sums if each.device == one.device]) for one in sums}
    left = {device: iter(found.tolist()) for device, found in devices.items()}
    return [
        f"{_of_one(tensor)}{next(left[one.device]) % MODULUS:016x}" for tensor, one in zip(tensors, sums, strict=True)
    ]


def plain(found: str) -> int:
    """The sum that does not ask for the order of the tensors, of a check sum of whole tensors."""
    return int(found[_DIGITS:], 16)


def is_whole(found: str) -> bool:
    """Whether it is of whole tensors, so that two replicas must have the same."""
    return "-" not in found


def over_all(found: Sequence[str | None]) -> str | None:
    """From those of all ranks to that of the whole tensors; None where it can't be told."""
    seen = [one for one in found if one is not None]
    if not seen or len(seen) < len(found):
        return None
    if all(map(is_whole, seen)):
        return seen[0] if len(set(seen)) == 1 else None
    if not all(one.startswith((SHARD, COPY)) for one in seen):
        return None
    shares = [one.removeprefix(SHARD) for one in seen if one.startswith(SHARD)]
    return _written(sum(int(one[:_DIGITS], 16) for one in shares), sum(int(one[_DIGITS:], 16) for one in shares))


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; any other tensor is whole."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def as_integers(torch: Any, tensor: Any) -> Any:
    """The same memory, read as integers of the same size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(kinds[real.element_size()])


def _sum_of_bits(torch: Any, tensor: Any) -> Any:
    """On a CPU part by part: torch makes a wider copy of what it sums, which takes six times as long where that does
    not fit in the cache."""
    whole = as_integers(torch, tensor)
    if whole.device.type == "cpu" and whole.is_contiguous() and whole.numel() > _PART:
        whole = torch.stack([part.to(torch.int64).sum() for part in whole.view(-1).split(_PART)])
    return whole.sum(dtype=torch.int64)


def _written(ordered: int, unordered: int) -> str:
    return f"{ordered % MODULUS:016x}{unordered % MODULUS:016x}"


def _factor(place: int) -> int:
    """Odd, so that no bit of a tensor's sum is lost; far apart for neighbours (Knuth's multiplicative hash)."""
    return (place * 0x9E3779B97F4A7C15 + 1) % MODULUS | 1


def _kind(tensors: Sequence[Any]) -> str:
    kinds = {_of_one(tensor) for tensor in tensors}
    return kinds.pop() if len(kinds) == 1 else MIXED


def _of_one(tensor: Any) -> str:
    if local(tensor) is tensor:
        return ""
    copied = [mesh_dim for mesh_dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    place = tensor.device_mesh.get_coordinate()
    return COPY if place is not None and any(place[mesh_dim] for mesh_dim in copied) else SHARD
