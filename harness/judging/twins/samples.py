"""The samples of a step: whether two runs have the same, how often each was consumed, and their names in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from torchaos.harness.judging.noise.quantities import Steps
from torchaos.harness.record.history import Execution, StepTable
from torchaos.harness.record.steps import Both

Samples = Counter[Hashable]  # by sample (an index or a digest): how often it was consumed
Read = Callable[[Execution], tuple[Hashable, ...]]


def _digests(execution: Execution) -> tuple[Hashable, ...]:
    return tuple(sample for sample in execution.samples if sample is not None)


def _indices(execution: Execution) -> tuple[Hashable, ...]:
    return execution.indices


def _by_index(execution: Execution) -> tuple[Hashable, ...]:
    return execution.indices or _digests(execution)


def reader(ours: Steps, theirs: Steps) -> Read:
    """A function that returns the samples of a step for messages: by index if both sides have indices and use them for
    the same samples, because the contents of a sample may be drawn again each time. It is not used to decide whether
    samples are equal."""
    return _by_index if by_index(ours, theirs) and not renumbered(ours, theirs) else _digests


def renumbered(ours: Steps, theirs: Steps) -> bool:
    """Whether the two sides have other indices for the same samples, as in a dataset that is made of the rest of an
    epoch. Looks only at steps that differ, at samples with a digest of their own, and at contents that came with one
    index on each side."""
    mine, twins = StepTable.of(ours), StepTable.of(theirs)
    other = different(mine, twins)
    had, has = _indices_of(mine.at(other)), _indices_of(twins.at(other))
    return any(len(had[sample]) == len(has[sample]) == 1 and had[sample] != has[sample] for sample in had.keys() & has)


def have_other_contents(mine: Mapping[int, Execution], others: Mapping[int, Execution]) -> bool:
    """Whether two steps use equal indices, and no index came with the same contents in both."""
    had, has = set(_named_contents(mine)), set(_named_contents(others))
    return not had & has and not {index for _, index in had}.isdisjoint(index for _, index in has)


def _indices_of(steps: StepTable) -> dict[Hashable, set[Hashable]]:
    """By digest, all indices with which it came."""
    found: dict[Hashable, set[Hashable]] = {}
    for by_rank in steps.values():
        for sample, index in _named_contents(by_rank):
            found.setdefault(sample, set()).add(index)
    return found


def _named_contents(by_rank: Mapping[int, Execution]) -> Iterator[tuple[Hashable, Hashable]]:
    """The digest and the index of each sample that has a digest of its own."""
    for execution in by_rank.values():
        if len(execution.samples) == len(execution.indices):
            yield from zip(execution.samples, execution.indices, strict=True)


def by_index(*histories: Steps) -> bool:
    """Whether the indices of each step are known on all sides, or on none."""
    known, unknown = set[int](), set[int]()
    for steps in map(StepTable.of, histories):
        has = steps.executions.column("in_indices") > 0
        known |= set(steps.numbers[steps.any(has)].tolist())
        unknown |= set(steps.numbers[steps.any(~has)].tolist())
    return not known & unknown


def are_same(mine: Mapping[int, Execution], others: Mapping[int, Execution]) -> bool:
    """Whether the two steps trained on the same samples. If there is one digest for each sample, equal digests are
    enough, and the indices may differ. If a digest is of another part of the batch (tokens of packed samples), the
    indices must be equal too, if all are known."""
    if counts_of(mine) != counts_of(others):
        return False
    every = [*mine.values(), *others.values()]
    if not all(execution.indices for execution in every) or all(
        len(execution.indices) == len(execution.samples) for execution in every
    ):
        return True
    return counts_of(mine, _indices) == counts_of(others, _indices)


def not_surely_same(mine: StepTable, others: StepTable) -> list[int]:
    """The steps of either side, except steps in which all samples were seen and are the same on each rank."""
    both = Both.of(mine, others)
    ours, theirs = both.ours.executions, both.theirs.executions
    other = ~(ours.samples_seen & theirs.samples_seen & both.equal("samples"))
    one_each = (ours.column("in_samples") == ours.column("in_indices")) & (
        theirs.column("in_samples") == theirs.column("in_indices")
    )
    if (other | ~one_each).any():
        by_index = both.ours.any(~both.equal("indices")) & both.ours.any(~one_each)
    else:
        by_index = np.zeros(len(both.ours), bool)
    same = both.ours.numbers[~(both.ours.any(other) | by_index)]
    found: list[int] = np.setdiff1d(np.union1d(mine.numbers, others.numbers), same).tolist()
    return found


def different(mine: StepTable, others: StepTable) -> list[int]:
    """The steps of either side, except steps that consumed the same samples, with the same indices, on each rank."""
    both = Both.of(mine, others)
    other = ~(both.equal("samples") & both.equal("indices"))
    same = both.ours.numbers[~both.ours.any(other)]
    found: list[int] = np.setdiff1d(np.union1d(mine.numbers, others.numbers), same).tolist()
    return found


def steps_like(steps: StepTable, by_rank: Mapping[int, Execution], read: Read) -> set[int]:
    """The numbers of the steps that trained on the same samples as the step `by_rank`, even if on other ranks."""
    own = StepTable.of({0: dict(enumerate(replace(execution, global_step=0) for execution in by_rank.values()))})
    near = np.zeros(len(steps), bool)
    for name in ("samples_sum", "indices_sum"):
        near |= steps.sums(steps.executions.column(name)) == own.sums(own.executions.column(name))
    got = counts_of(by_rank, read)
    return {step for step in steps.numbers[near].tolist() if counts_of(steps[step], read) == got}


def in_order(by_rank: Mapping[int, Execution]) -> tuple[tuple[int, tuple[Hashable, ...]], ...]:
    """The contents of a step, rank by rank. If no other step of the twin has the same contents, they identify the
    samples even if indices differ: after a resume an index may count from another sample, for example in a Subset of
    the rest of an epoch."""
    return tuple((rank, _digests(execution)) for rank, execution in sorted(by_rank.items()))


def counts_of(by_rank: Mapping[int, Execution], read: Read = _digests) -> Samples:
    return Counter(sample for execution in by_rank.values() for sample in read(execution))


def total_of(steps: Iterable[Mapping[int, Execution]], read: Read) -> Samples:
    return Counter(sample for by_rank in steps for sample in counts_of(by_rank, read).elements())


def all_seen(by_rank: Mapping[int, Execution]) -> bool:
    return all(execution.samples_seen for execution in by_rank.values())


def named(samples: Samples) -> str:
    """The samples in words: their indices if known, otherwise only how many there are."""
    indices = [sample for sample in samples if isinstance(sample, int)]
    return ranges(indices) if indices else f"{samples.total()} samples"


def ranges(indices: Iterable[int], most: int = 4) -> str:
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][1] + 1 == index:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:most]]
    return f"samples {', '.join(words)}{' and others' if len(ranges) > most else ''}"
