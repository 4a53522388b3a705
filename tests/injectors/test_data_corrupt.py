"""data.corrupt: the chosen bit of each number of the next batch is flipped, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.injectors.data_corrupt import CorruptBatch


class Site:
    """Keeps what the injector asked for and said."""

    fault = "bad"

    def __init__(self) -> None:
        self.told: list[tuple[Kind, dict[str, Any]]] = []

    def at_next_batch(self, then: Callable[[Any], None]) -> None:
        self.gives = then

    def emit(self, kind: Kind, data: dict[str, Any]) -> None:
        self.told.append((kind, data))


def hit(batch: Any, **params: Any) -> list[tuple[Kind, dict[str, Any]]]:
    site = Site()
    on_site: Any = site
    CorruptBatch(**params).apply(on_site)
    assert site.told == []
    site.gives(batch)
    return site.told


def test_the_highest_bit_in_use_of_integers_is_flipped() -> None:
    """Tokens stay about as large as they are, so that a vocabulary that is a power of two still has them."""
    batch = {"mask": torch.ones(2, 3, dtype=torch.int8), "text": torch.tensor([[1, 70, 122], [64, 0, 3]])}
    told = hit(batch)
    assert batch["text"].tolist() == [[65, 6, 58], [0, 64, 67]]
    assert batch["mask"].tolist() == [[1] * 3] * 2
    assert told == [(Kind.EFFECT, {"fault": "bad", "effect": "bit 6 of 6 numbers of a batch was flipped"})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_get_the_other_sign(dtype: torch.dtype) -> None:
    """Their highest bit is the sign."""
    images = torch.tensor([1.5, -2.0, 0.25], dtype=dtype)
    hit([images])
    assert images.tolist() == [-1.5, 2.0, -0.25]


def test_only_so_many_samples_are_hit() -> None:
    """The rest of the batch is whole."""
    text = torch.zeros(3, 2, dtype=torch.uint8)
    hit((text, 7), samples=1, bit=7)
    assert text.tolist() == [[128, 128], [0, 0], [0, 0]]
    assert text._version == 0  # it is still known as the tensor that the loader gave


@pytest.mark.parametrize(("batch", "bit"), [(["a text"], None), (torch.empty(0), None), (torch.ones(2), 32)])
def test_a_batch_that_cannot_be_hit_is_missed(batch: Any, bit: int | None) -> None:
    """The job gets its batch, and the fault is not said to have been applied."""
    ((kind, data),) = hit(batch, bit=bit)
    assert kind is Kind.MISSED
    assert data["reason"].startswith("no batch was corrupted: it")


@pytest.mark.parametrize(("after", "another"), [(False, False), (True, False), (True, True)])
def test_a_rank_that_torchrun_ended_felt_it_if_another_gave_up_after_it(
    trainer: Any, after: bool, another: bool
) -> None:
    """A rank that ended with an error in an earlier attempt, before the fault, is no evidence, nor is one that ended
    after another fault, which may be why."""
    run = trainer(kills=[(10, 1), (18, 1)]).record()
    hit = max((event for event in run.events if event.kind is Kind.APPLYING), key=lambda event: event.mono_s)
    codes = {0: 1, 1: -15}  # by attempt, of rank 1

    def ended(event: Event) -> Event:
        if event.kind is not Kind.RANK_EXITED:
            return event
        own = event.rank == 1 or not event.attempt
        code = codes.get(event.attempt or 0, 0) if own else int(after)
        return replace(event, data={**event.data, "exit_code": code})

    events = [ended(event) for event in run.events if event.kind is not Kind.APPLYING or event is hit]
    if another:
        later = replace(hit, mono_s=hit.mono_s + 1e-6, data={**hit.data, "fault": "another"})
        events.insert(events.index(hit) + 1, later)
    found = CorruptBatch().felt(replace(run, events=tuple(events)), hit.data["fault"])
    assert bool(found) is (after and not another), found
