"""data.corrupt: a batch comes damaged out of the data loader, as after a fault in the memory of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchaos.injectors.numeric import Corruption
from torchaos.plugin import Count, Kind, RankSite, Target
from torchaos.plugin.families.ranks import as_integers


@dataclass(frozen=True)
class CorruptBatch(Corruption):
    """Flips one bit of each number in the next batch that the loop gets from its loader, in the largest of the batch's
    tensors. The data set stays whole. `bit`: its number, counted from the least significant; None: the sign of floats,
    the highest bit that is used of integers. `samples`: how many of the batch's samples are hit; None: all."""

    bit: int | None = None
    samples: Count | None = None

    name = "data.corrupt"
    phase = "data"
    family = "numeric"

    def plan(self, target: Target, draw: Any) -> CorruptBatch:
        return self

    def apply(self, site: RankSite) -> None:
        def corrupt(batch: Any) -> None:
            try:
                effect = _flip(batch, self.bit, self.samples)
            except Exception as error:
                site.emit(Kind.MISSED, {"fault": site.fault, "reason": f"no batch was corrupted: {error}"})
            else:
                site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect})

        site.at_next_batch(corrupt)


def _flip(batch: Any, bit: int | None, samples: int | None) -> str:
    whole = max(_tensors(batch), key=lambda one: one.numel() * one.element_size(), default=None)
    if whole is None or not whole.numel():
        raise ValueError("it has no tensor of numbers in host memory")
    part = whole.data[:samples] if whole.ndim else whole.data  # with detach(), autograd would notice the change
    number, width = _highest(part) if bit is None else bit, 8 * part.element_size()
    if not 0 <= number < width:
        raise ValueError(f"its numbers have the bits 0 to {width - 1}, and no bit {number}")
    # The sign bit is the smallest integer.
    as_integers(import_module("torch"), part).bitwise_xor_(1 << number if number < width - 1 else -(1 << number))
    return f"bit {number} of {part.numel()} numbers of a batch was flipped"


def _highest(part: Any) -> int:
    if part.is_floating_point():
        return int(8 * part.element_size() - 1)
    return max(0, int(part.max()).bit_length() - 1)


def _tensors(batch: Any) -> Sequence[Any]:
    """The tensors of numbers in host memory that are in a batch of tuples, lists and mappings, in order."""
    found, stack = [], [batch]
    while stack:
        one = stack.pop(0)
        if isinstance(one, (list, tuple)):
            stack = [*one, *stack]
        elif hasattr(one, "keys") and hasattr(one, "values"):
            stack = [*one.values(), *stack]
        elif hasattr(one, "untyped_storage") and one.is_cpu and not one.is_complex():
            found.append(one)
    return found
