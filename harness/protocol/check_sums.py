"""Check sums of tensors and of samples. Standard library only, and the torch of the job.

A check sum of tensors adds up over the ranks that share them, whatever their number. It consists of two sums, modulo
2**64, over the bits of the tensors, read as integers. In the first sum, each tensor has a factor of its own. The
second, the plain sum, has no factors. So the check sum changes if a bit flips or if two tensors change places, but not
if elements change places within one tensor. The plain sum does not depend on the order of the tensors.

A check sum is 32 hexadecimal digits, after a prefix that tells what it covers:

    no prefix          every tensor is whole in this rank, as under DDP
    SHARD              parts of tensors, or some of the tensors; the sums of all ranks add up to that of the whole
    PART and numbers   such as `part0.1`: one part of one tensor, by its place in the mesh. If several ranks have the
                       same part, they have the same prefix, and the part counts once
    COPY               parts that another rank has as well (hybrid sharding), and that count there
    MIXED              whole tensors and parts, or parts of which copies may exist; such sums can't be added up

`Sums` describe a step's samples when a rank has written as many bytes about samples as it may: how many samples there
are, and the sum of their numbers. The number of a sample is its digest or its index, mixed as in
record/steps/execution.py (`in_any_order`). So a run and its twin can be compared even if only one of them has sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

from .packed_lines import ROW

SHARD, PART, COPY, MIXED = "shard-", "part", "copy-", "mixed-"
MODULUS, _DIGITS = 1 << 64, 16
_PART = 1 << 16  # elements
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def check_sum(torch: Any, tensors: Sequence[tuple[int, Any]]) -> str:
    """The check sum of (place, tensor) pairs. `place`: the index of the tensor, from 0."""
    if not tensors:
        return _written(0, 0)
    parts = [local(tensor) for _place, tensor in tensors]
    with torch.no_grad():
        sums = stacked(torch, [_sum_of_bits(torch, part) for part in parts]).tolist()
    ordered = sum(_factor(place) * bits for (place, _tensor), bits in zip(tensors, sums, strict=True))
    return _kind(torch, [tensor for _place, tensor in tensors]) + _written(ordered, sum(sums))


def plain_of_each(torch: Any, tensors: Sequence[Any]) -> list[str]:
    """The prefix (none or PART) and the plain sum (16 hexadecimal digits) of each tensor. An empty text for a tensor
    whose memory can't be read as numbers, such as a sparse tensor."""
    with torch.no_grad():
        found = [_sum_or_none(torch, local(tensor)) for tensor in tensors]
        sums = iter(stacked(torch, known).tolist() if (known := [one for one in found if one is not None]) else [])
    return [
        "" if one is None else f"{_place_of(tensor)}{next(sums) % MODULUS:016x}"
        for one, tensor in zip(found, tensors, strict=True)
    ]


def stacked(torch: Any, scalars: Sequence[Any]) -> Any:
    """The scalar tensors as one tensor. They may be on different devices: a rank may spread its model over several
    GPUs, or keep a part of it on the CPU."""
    here = scalars[0].device
    if any(each.device != here for each in scalars):
        scalars = [each.to(here) for each in scalars]
    return torch.stack(scalars)


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain(text: str) -> int:
    """The plain sum (the second of the two sums) in a check sum of whole tensors."""
    return int(text[_DIGITS:], 16)


def without_order(text: str) -> str:
    """The check sum without its first sum, which depends on the order of the tensors."""
    return text[: -2 * _DIGITS] + text[-_DIGITS:]


def is_of_nothing(text: str | None) -> bool:
    """Whether the check sum covers no tensor, or only zeros."""
    return text is None or not text.strip("0")


def is_whole(text: str) -> bool:
    """Whether the check sum covers whole tensors, so that two replicas must have equal check sums."""
    return "-" not in text


def over_all(of_ranks: Sequence[str | None]) -> str | None:
    """The check sum of the whole tensors, from the check sums of all ranks. None if they can't be combined."""
    known = [text for text in of_ranks if text is not None]
    if not known or len(known) < len(of_ranks):
        return None
    if all(map(is_whole, known)):
        return known[0] if len(set(known)) == 1 else None
    if not all(text.startswith((SHARD, COPY)) for text in known):
        return None
    shares = [text.removeprefix(SHARD) for text in known if text.startswith(SHARD)]
    return _written(sum(int(text[:_DIGITS], 16) for text in shares), sum(int(text[_DIGITS:], 16) for text in shares))


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor. Any other tensor is returned unchanged."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def as_integers(torch: Any, tensor: Any) -> Any:
    """The tensor's memory, viewed as integers of the same size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(kinds[real.element_size()])


def _sum_or_none(torch: Any, tensor: Any) -> Any:
    try:
        return _sum_of_bits(torch, tensor)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):
        return None


def _sum_of_bits(torch: Any, tensor: Any) -> Any:
    """The sum of the tensor's bits, as an int64 tensor. On a CPU it is computed in parts, because torch first makes a
    copy of a wider type, and this takes six times as long if the copy does not fit into the cache."""
    whole = as_integers(torch, tensor)
    if whole.device.type == "cpu" and whole.is_contiguous() and whole.numel() > _PART:
        whole = torch.stack([part.to(torch.int64).sum() for part in whole.view(-1).split(_PART)])
    return whole.sum(dtype=torch.int64)


def _written(ordered: int, unordered: int) -> str:
    return f"{ordered % MODULUS:016x}{unordered % MODULUS:016x}"


def _factor(place: int) -> int:
    """The factor of a place. It is odd, so that no bit of a tensor's sum is lost. Neighbours have very different
    factors (Knuth's multiplicative hash)."""
    return (place * 0x9E3779B97F4A7C15 + 1) % MODULUS | 1


def _kind(torch: Any, tensors: Sequence[Any]) -> str:
    kinds = {_prefix(torch, tensor) for tensor in tensors}
    return kinds.pop() if len(kinds) == 1 else MIXED


def _prefix(torch: Any, tensor: Any) -> str:
    if local(tensor) is tensor:
        return ""
    if torch.distributed.is_initialized() and tensor.device_mesh.size() < torch.distributed.get_world_size():
        return MIXED  # the ranks outside the mesh of the tensor may have copies of it
    copied = [mesh_dim for mesh_dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    place = tensor.device_mesh.get_coordinate()
    return COPY if place is not None and any(place[mesh_dim] for mesh_dim in copied) else SHARD


def _place_of(tensor: Any) -> str:
    """The place of a DTensor's part: its coordinates in those dimensions of the mesh over which the tensor is
    divided."""
    if local(tensor) is tensor:
        return ""
    place = tensor.device_mesh.get_coordinate() or ()
    own = [str(at) for at, placement in zip(place, tensor.placements, strict=False) if not placement.is_replicate()]
    return f"{PART}{'.'.join(own)}-" if own else ""


_MASK = (1 << 64) - 1
_LANE = 16  # bytes, enough for a product of two 64-bit numbers
_ALL = (1 << 8 * _LANE) - 1


class Sums(NamedTuple):
    """The samples of a rank in a step. The sums are modulo 2**64, so the sums of several ranks can be added."""

    in_samples: int
    samples: int  # the sum over the digests
    in_indices: int  # 0: the indices are not known
    indices: int  # the sum over the indices


def sums_of(samples: bytes, indices: Sequence[int] | None) -> Sums:
    """The sums for these samples. `samples`: the digests, ROW bytes each. `indices`: None if not known."""
    return Sums(len(samples) // ROW, _sum_of_digests(samples), len(indices or ()), mixed_sum(indices or ()))


def mixed_sum(numbers: Iterable[int]) -> int:
    """The sum of the mixed numbers (splitmix64), modulo 2**64."""
    found = [number & _MASK for number in numbers]
    return _mixed_sum(_lanes(len(found)).layout.pack(*found))


def _sum_of_digests(samples: bytes) -> int:
    lanes = bytearray(len(samples) // ROW * _LANE)
    for place in range(ROW):  # a digest begins with its highest byte, and a lane with its lowest
        lanes[ROW - 1 - place :: _LANE] = samples[place::ROW]
    return _mixed_sum(lanes)


class _Lanes(NamedTuple):
    """Constants for `count` lanes in one large integer. Each lane has a 64-bit number, and as many bits for its
    products, so that one operation of Python computes with all numbers at once."""

    layout: Struct
    gamma: int
    mask: int  # the lower half of each lane


@lru_cache(maxsize=64)
def _lanes(count: int) -> _Lanes:
    ones = int.from_bytes((1).to_bytes(_LANE, "little") * count, "little")
    return _Lanes(Struct(f"<{'Q8x' * count}"), ones * 0x9E3779B97F4A7C15, ones * _MASK)


def _mixed_sum(lanes: bytes | bytearray) -> int:
    _layout, gamma, mask = _lanes(len(lanes) // _LANE)
    x = int.from_bytes(lanes, "little") + gamma & mask
    x = ((x ^ x >> 30) & mask) * 0xBF58476D1CE4E5B9 & mask
    x = ((x ^ x >> 27) & mask) * 0x94D049BB133111EB & mask
    x = (x ^ x >> 31) & mask
    return x % _ALL & _MASK  # the sum of the lanes, because 2**128 is 1 modulo _ALL


OF_A_RUN = 768 << 20  # bytes that a run may write about samples, divided among the ranks


def sample_bytes_of_each(ranks: int) -> int:
    """How many bytes each rank may write about samples. `ranks`: the number of ranks."""
    return OF_A_RUN // max(1, ranks)
