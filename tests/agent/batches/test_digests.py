"""Tests which rows of a batch are its samples."""

from __future__ import annotations

from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def rows(agent_module: Callable[[str], Any]) -> Callable[..., int]:
    """How many samples a batch is told to have."""
    digests = agent_module("agent.batches.sample_digests")

    def count(batch: Any, drawn: int | None = None) -> int:
        found = digests.digest(digests.look(batch), None if drawn is None else tuple(range(drawn)))
        size: int = digests.ROW
        return len(found.samples) // size

    return count


def ones(*shape: int) -> Any:
    return torch.ones(shape)


def test_samples_are_as_many_as_were_drawn(rows: Callable[..., int]) -> None:
    """Where indices are known, what has as many rows has the samples, whatever else the batch begins with."""
    assert rows({"mask": ones(5, 5), "weights": ones(5), "x": ones(8, 16)}, drawn=8) == 8
    assert rows({"ids": [ones(3), ones(3)], "x": ones(2, 4)}, drawn=2) == 2


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"mask": ones(5, 5), "x": ones(8, 16), "y": ones(8)}, 8),
        ({"cu_seqlens": torch.arange(9), "tokens": ones(64), "labels": ones(64)}, 64),
        ({"x": ones(4, 16), "attention": ones(4, 16), "labels": ones(64)}, 4),
        ({"mask": ones(5, 5), "x": ones(8, 16)}, 8),
        ([ones(10), ones(8, 16)], 8),
        ({"mask": ones(50, 50), "texts": ["a text of some length", "another one"]}, 2),
        ([ones(4, 2), [{"a": ones(4, 3)}, {"b": (ones(4),)}]], 4),
    ],
    ids=["mask", "packed", "labels of tokens", "mask alone", "weights of classes", "texts", "nested"],
)
def test_samples_are_what_most_of_a_batch_has(rows: Callable[..., int], batch: Any, samples: int) -> None:
    """Where none are known (an IterableDataset): the most frequent number of rows, and of equals the widest rows."""
    assert rows(batch) == samples


def test_counters_of_a_loader_are_no_part_of_a_sample(agent_module: Callable[[str], Any]) -> None:
    """LitData's loader counts the samples that each stream gave. After a resume its counts may be others."""
    digests = agent_module("agent.batches.sample_digests")

    def samples(count: int) -> Any:
        batch = {"__SAMPLES__": torch.arange(8), "__NUM_SAMPLES_YIELDED__": [torch.full((8,), count)]}
        return digests.digest(digests.look(batch)).samples

    assert samples(8) == samples(40)


class NotAskedWithIn(dict[str, Any]):
    """As a TensorDict, which refuses `name in batch`."""

    def __contains__(self, name: object) -> bool:
        raise NotImplementedError


def test_a_mapping_that_refuses_in(agent_module: Callable[[str], Any]) -> None:
    """Its values are seen as those of any other mapping."""
    digests, rows = agent_module("agent.batches.sample_digests"), {"x": torch.arange(8)}
    seen = [digests.digest(digests.look(batch)).samples for batch in (NotAskedWithIn(rows), rows)]
    assert seen[0] == seen[1] != b""


def test_contents_of_samples_are_told_apart_behind_a_mask(agent_module: Callable[[str], Any]) -> None:
    """Two batches with one mask and other samples have no digest in common."""
    digests = agent_module("agent.batches.sample_digests")
    in_hex = agent_module("protocol.packed_lines").in_hex
    batches = ({"mask": ones(5, 5), "x": torch.arange(n, n + 8.0)[:, None].repeat(1, 4)} for n in (0, 8))
    first, second = (in_hex(digests.digest(digests.look(batch)).samples) for batch in batches)
    assert not set(first) & set(second)


@pytest.mark.parametrize("width", [300, 3000, 30_000])
def test_digest_of_a_row_depends_on_the_row_alone(agent_module: Callable[[str], Any], width: int) -> None:
    """A row has the same digest in a small batch, whose memory is copied, and in a large batch, whose memory is viewed,
    whether all of the row is digested, or bytes or words of it; a row that differs all over has another digest."""
    digests, in_hex = agent_module("agent.batches.sample_digests"), agent_module("protocol.packed_lines").in_hex
    values = torch.arange(100.0 * width).view(100, width)
    few, many = (in_hex(digests.digest(digests.look([part, part[:, 0]])).samples) for part in (values[:2], values))
    assert many[:2] == few
    assert len(set(many)) == 100
