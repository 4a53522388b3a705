"""The samples of a step: whether two runs have the same, and how often and when each was consumed.

Ranks may take over each other's samples after a restart, as with a sampler that deals them out anew. The sum over the
ranks is the same, so each loss is compared with that of the twin's rank that had the same samples. Iterations without
an optimizer step, as when a loss scale is too large, count too: if the run skips other iterations than the twin, every
later step has the samples and the rate of another step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.tolerance import Steps
from torchaos.harness.protocol.collective_stamps import ranges_of
from torchaos.harness.record.history import Execution, StepTable
from torchaos.harness.record.plan import counted
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import lengths
from torchaos.harness.record.steps.execution import as_indices, sums_of, with_values

Array = npt.NDArray[Any]
_ENOUGH = 100  # steps: a run may differ in each of millions
_MOST_RANGES = 4  # of samples in a sentence
Samples = Counter[Hashable]  # by sample (an index or a digest): how often it was consumed
Read = Callable[[Execution], tuple[Hashable, ...]]


def digests_of(execution: Execution) -> tuple[Hashable, ...]:
    return tuple(sample for sample in execution.samples if sample is not None)


def _indices(execution: Execution) -> tuple[Hashable, ...]:
    return execution.indices


def _by_index(execution: Execution) -> tuple[Hashable, ...]:
    return execution.indices or digests_of(execution)


def reader(ours: Steps, theirs: Steps) -> Read:
    """A function that returns the samples of a step for messages: by index if both sides have indices and use them for
    the same samples, because the contents of a sample may be drawn again each time; otherwise by digest. Whether
    samples are equal is decided elsewhere."""
    return _by_index if by_index(ours, theirs) and not renumbered(ours, theirs) else digests_of


def renumbered(ours: Steps, theirs: Steps) -> bool:
    """Whether the two sides have other indices for the same samples, as in a dataset that is made of the rest of an
    epoch. Looks only at the first steps that differ, and there at samples with a digest of their own and only one index
    on each side."""
    mine, twins = StepTable.of(ours), StepTable.of(theirs)
    other = different(mine, twins)[:_ENOUGH]
    had, has = _indices_of(mine.at(other)), _indices_of(twins.at(other))
    return any(len(had[sample]) == len(has[sample]) == 1 and had[sample] != has[sample] for sample in had.keys() & has)


def have_other_contents(mine: Mapping[int, Execution], others: Mapping[int, Execution]) -> bool:
    """Whether two steps use equal indices, and no index came with the same contents in both."""
    had, has = set(_named_contents(mine)), set(_named_contents(others))
    return not had & has and not {index for _, index in had}.isdisjoint(index for _, index in has)


def _indices_of(steps: StepTable) -> dict[Hashable, set[Hashable]]:
    """For each digest of a sample, all indices of the data set with which it was seen."""
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
    enough, and the indices may differ. If a digest is of something else (tokens of packed samples), the indices must be
    equal too, if all are known. If one side has only sums, the sums decide."""
    if any_summed(mine, others):
        return _same_sums(mine, others)
    if counts_of(mine) != counts_of(others):
        return False
    every = [*mine.values(), *others.values()]
    if not all(execution.indices for execution in every) or all(
        len(execution.indices) == len(execution.samples) for execution in every
    ):
        return True
    return counts_of(mine, _indices) == counts_of(others, _indices)


def ends_of(mine: Mapping[int, Execution], others: Mapping[int, Execution]) -> bool:
    """Whether a step did the end of another step, or all of it, on each rank, as far as its samples were seen."""
    for rank in mine.keys() & others.keys():
        part, whole = mine[rank].samples, others[rank].samples
        pairs = zip(reversed(part), reversed(whole), strict=False)
        if len(part) > len(whole) or not all(None in pair or pair[0] == pair[1] for pair in pairs):
            return False
    return True


def any_summed(*steps: Mapping[int, Execution]) -> bool:
    """Whether only the sum of the samples is known on some rank."""
    return any(execution.sums is not None for by_rank in steps for execution in by_rank.values())


def _same_sums(mine: Mapping[int, Execution], others: Mapping[int, Execution]) -> bool:
    ours, theirs = (
        [sums_of(execution) for _, execution in sorted(by_rank.items())] for by_rank in (mine, others)
    )  # fmt: skip
    every = [*ours, *theirs]
    one_each = all(sums.in_indices in (0, sums.in_samples) for sums in every)
    by_samples = one_each or not all(sums.in_indices for sums in every)
    part = slice(0, 2 if by_samples else 4)
    totals = [[sum(column) % 2**64 for column in zip(*side, strict=True)][part] for side in (ours, theirs)]
    return totals[0] == totals[1]


def not_surely_same(mine: StepTable, others: StepTable) -> list[int]:
    """The steps of either side, without those in which all samples were seen and are the same on each rank."""
    both = Both.of(mine, others)
    ours, theirs = both.ours.executions, both.theirs.executions
    other = ~(ours.samples_known & theirs.samples_known & _equal(both))
    one_each = (ours.column("in_samples") == ours.column("in_indices")) & (
        theirs.column("in_samples") == theirs.column("in_indices")
    )
    if (other | ~one_each).any():
        by_index = both.ours.any(~_equal(both, "indices")) & both.ours.any(~one_each)
    else:
        by_index = np.zeros(len(both.ours), bool)
    same = both.ours.numbers[~(both.ours.any(other) | by_index)]
    found: list[int] = np.setdiff1d(np.union1d(mine.numbers, others.numbers), same).tolist()
    return found


def different(mine: StepTable, others: StepTable) -> list[int]:
    """The steps in which the samples or indices of a rank differ, or that only one side made."""
    both = Both.of(mine, others)
    other = ~(_equal(both) & _equal(both, "indices"))
    same = both.ours.numbers[~both.ours.any(other)]
    found: list[int] = np.setdiff1d(np.union1d(mine.numbers, others.numbers), same).tolist()
    return found


def _equal(both: Both, name: str = "samples") -> Array:
    """For each step and rank: whether both runs have the same samples; in the same order, if the order is known."""
    summed = both.ours.executions.column("summed") | both.theirs.executions.column("summed")
    equal = both.equal(name)
    if summed.any():
        equal = np.where(summed, both.equal(f"in_{name}") & both.equal(f"{name}_sum"), equal)
    return equal


def steps_like(steps: StepTable, by_rank: Mapping[int, Execution], read: Read) -> set[int]:
    """The numbers of the steps that trained on the same samples as the step `by_rank`, even if on other ranks."""
    own = StepTable.of({0: dict(enumerate(replace(execution, global_step=0) for execution in by_rank.values()))})
    near = np.zeros(len(steps), bool)
    for name in ("samples_sum", "indices_sum"):
        near |= steps.sums(steps.executions.column(name)) == own.sums(own.executions.column(name))
    got = counts_of(by_rank, read)

    def is_like(other: Mapping[int, Execution]) -> bool:
        return are_same(by_rank, other) if any_summed(by_rank, other) else counts_of(other, read) == got

    return {step for step in steps.numbers[near].tolist() if is_like(steps[step])}


def in_order(
    by_rank: Mapping[int, Execution], by_sum: bool = False
) -> tuple[tuple[int, tuple[Hashable, ...]], ...]:  # fmt: skip
    """The contents of a step, rank by rank. `by_sum`: only their sums, because some steps have only sums. If only one
    step of the twin has these contents, they identify the samples even if indices differ: after a resume an index may
    count from another sample, for example in a Subset of the rest of an epoch."""
    return tuple(
        (rank, sums_of(execution)[:2] if by_sum else digests_of(execution))
        for rank, execution in sorted(by_rank.items())
    )


def counts_of(by_rank: Mapping[int, Execution], read: Read = digests_of) -> Samples:
    return Counter(sample for execution in by_rank.values() for sample in read(execution))


def total_of(steps: Iterable[Mapping[int, Execution]], read: Read) -> Samples:
    return Counter(sample for by_rank in steps for sample in counts_of(by_rank, read).elements())


def are_copied(steps: StepTable) -> bool:
    """Whether in each step some ranks consumed the same samples, as the stages of a pipeline do."""
    return len(steps) > 0 and bool(steps.any(_is_copy(steps)).all())


def without_copies(steps: StepTable) -> StepTable:
    """The steps without the ranks that consumed the same samples as a rank before them."""
    return StepTable(steps.executions.at(~_is_copy(steps)))


def _is_copy(steps: StepTable) -> Array:
    """For each execution, whether a rank before it consumed the same samples in the step."""
    every = steps.executions
    step, total = every.global_step, every.column("samples_sum")
    order = np.lexsort((every.rank, total, step))
    again = np.append(False, (np.diff(step[order]) == 0) & (total[order][1:] == total[order][:-1]))[: len(order)]
    found = np.zeros(len(order), bool)
    found[order] = again
    return found & every.samples_known & (every.column("in_samples") > 0)


def all_known(by_rank: Mapping[int, Execution]) -> bool:
    """Whether the samples of all ranks can be compared with others: each was seen, or their sum is known."""
    return all(execution.samples_seen or execution.sums is not None for execution in by_rank.values())


def are_summed(*histories: Steps) -> bool:
    """Whether only the sum of the samples is known of some step."""
    return any(StepTable.of(steps).executions.column("summed").any() for steps in histories)


def named(samples: Samples) -> str:
    """The samples in words: their indices if known, otherwise only how many there are."""
    indices = [sample for sample in samples if isinstance(sample, int)]
    return ranges(indices) if indices else counted(samples.total(), "sample")


def ranges(indices: Iterable[int]) -> str:
    found = ranges_of(sorted(set(indices)))
    words = [str(low) if low == high else f"{low}-{high}" for low, high in found[:_MOST_RANGES]]
    return f"samples {', '.join(words)}{' and others' if len(found) > _MOST_RANGES else ''}"


def indices_of(steps: StepTable, step: int) -> list[int]:
    """The indices of the samples that all ranks consumed in a step."""
    return [index for execution in steps[step].values() for index in execution.indices]


def came_earlier(steps: StepTable, step: int) -> bool:
    """Whether the first sample of a step was also consumed in an earlier step. A step that only repeats samples always
    begins with such a sample."""
    own = indices_of(steps, step)[:1]
    wanted = as_indices([own])[0]
    return any((indices[at < step] == wanted).any() for at, indices in (steps.executions.indices() if own else ()))


class FirstUses:
    """The first use of each sample, from all indices of the history."""

    def __init__(self, steps: StepTable) -> None:
        self._steps = steps
        every = [np.unique(indices) for _, indices in steps.executions.indices()]
        self._known = np.unique(np.concatenate([np.zeros(0, np.int64), *every]))
        self._first = np.full(len(self._known), np.iinfo(np.int64).max)
        for at, indices in steps.executions.indices():
            np.minimum.at(self._first, self._places(indices), at[:, None])

    def of(self, index: int) -> int:
        """The step that consumed this sample first."""
        return int(self._first[self._places(as_indices([[index]]))[0, 0]])

    def after(self, step: int) -> int:
        """How many samples were used for the first time after step `step`."""
        return int((self._first > step).sum())

    def repeated(self) -> set[int]:
        """The steps that consumed only samples of earlier steps."""
        had, new = set[int](), set[int]()
        for at, indices in self._steps.executions.indices():
            is_new = (self._first[self._places(indices)] >= at[:, None]).any(1)
            had |= set(at.tolist())
            new |= set(at[is_new].tolist())
        return had - new

    def _places(self, indices: Array) -> Array:
        return np.searchsorted(self._known, indices)


def with_losses_by_samples(ours: StepTable, theirs: StepTable) -> tuple[StepTable, list[int]]:
    """The run's steps as if each rank had consumed the samples that it consumed in the twin: if another rank consumed
    them, the rank gets that rank's losses. Also returns the numbers of the steps that this changed."""
    both = Both.of(ours, theirs)
    unseen = ~(both.ours.executions.samples_known & both.theirs.executions.samples_known)
    moved = both.ours.any(~both.equal("samples_sum")) & ~both.ours.any(unseen)
    first_rows = np.searchsorted(ours.executions.global_step, both.ours.numbers[moved])
    changed, new = [], dict[int, Execution]()
    for step, row in zip(both.ours.numbers[moved].tolist(), first_rows.tolist(), strict=True):
        if exchanged := _exchanged(ours[step], theirs[step]):
            changed.append(step)
            new.update(enumerate(exchanged, row))
    return (StepTable(ours.executions.replaced(new)) if new else ours), changed


def _exchanged(ours: Mapping[int, Execution], theirs: Mapping[int, Execution]) -> list[Execution]:
    """The step's executions in order of rank. Empty if the ranks did not just exchange their samples, or if two ranks
    consumed the same."""
    by_sum = any_summed(ours, theirs)

    def samples(execution: Execution) -> Hashable:
        return sums_of(execution)[:2] if by_sum else execution.samples

    by_samples = {samples(execution): execution for execution in ours.values()}
    if by_samples.keys() != set(map(samples, theirs.values())) or len(by_samples) < len(ours):
        return []
    donors = [(ours[rank], by_samples[samples(theirs[rank])]) for rank in sorted(ours)]
    return [
        with_values(own, {name: getattr(donor, name) for name in ("losses", "samples", "indices", "sums")})
        for own, donor in donors
    ]


def with_losses_of_whole_batches(ours: StepTable, theirs: StepTable, allowed: float) -> tuple[StepTable, list[int]]:
    """The run's steps as if each rank had divided its samples into as many backwards as in the twin: the losses are the
    twin's, multiplied by the ratio of its own sum of losses to the twin's. Also returns the numbers of the steps that
    this changed. `allowed`: relative; if the sums are farther apart, the losses stay as they are."""
    both, changed, new = Both.of(ours, theirs), list[int](), dict[int, Execution]()
    many = [lengths(side.executions.column("losses")) for side in (both.ours, both.theirs)]
    other = both.ours.any(many[0] != many[1])
    for step in both.ours.numbers[other].tolist():
        first = int(np.searchsorted(ours.executions.global_step, step))
        whole = {rank: _of_whole_batch(own, theirs[step][rank], allowed) for rank, own in sorted(ours[step].items())}
        if all(whole.values()):
            changed.append(step)
            new.update(enumerate((with_values(ours[step][r], {"losses": of}) for r, of in whole.items()), first))
    return (StepTable(ours.executions.replaced(new)) if new else ours), changed


def _of_whole_batch(own: Execution, twin: Execution, allowed: float) -> tuple[float, ...]:
    """Empty if the samples or the losses are not the twin's."""
    mine, twins = ([loss for loss in one.losses if loss is not None] for one in (own, twin))
    seen = own.samples_seen and twin.samples_seen and len(mine) == len(own.losses) and len(twins) == len(twin.losses)
    if not (seen and mine and sum(twins) and are_same({own.rank: own}, {own.rank: twin})):
        return ()
    factor = sum(mine) / sum(twins)
    return tuple(loss * factor for loss in twins) if abs(factor - 1) <= allowed else ()


_SKIPPED_ENOUGH = 10  # steps: a job may clear gradients in each of millions
ByStep = Mapping[int, Mapping[int, Execution]]


def other_iterations(ours: ByStep, theirs: ByStep, until: int | None = None) -> str:
    """A clause about the first step, at most `until`, in which another optimizer stepped than in the twin, or before
    which another number of iterations was skipped. Empty if there is none."""
    every, twins = StepTable.of(ours), StepTable.of(theirs)
    mine = every.up_to(until)
    turns = _by_turns(mine, twins, "opt_step") or _by_turns(mine, twins, "sched_step")
    return turns or _by_gradients(mine, twins, every) or _by_schedule(mine, twins)


def _by_turns(mine: StepTable, twins: StepTable, name: Literal["opt_step", "sched_step"]) -> str:
    """A clause: of optimizers that take turns, such as those of a GAN, another one stepped than in the twin. Empty if
    this is not shown. (Each step of each optimizer is a step of the job.)

    Each optimizer has its own counter (`opt_step`), or its LR schedule has (`sched_step`). It is shown if the counters
    of this step, in the run and in the twin, continue two different earlier counters of the twin. A counter alone may
    be wrong, so the samples must differ as well."""
    both = Both.of(mine, twins)
    other = both.ours.numbers[both.ours.any(~both.equal(name))].tolist()
    if not other or other[0] not in twins:
        return ""
    step, rank = other[0], min(mine[other[0]])
    stood = Counter[float]()  # of each optimizer, before this step
    for one in (twins[at][rank] for at in twins.numbers.tolist() if at < step and rank in twins[at]):
        if (counter := getattr(one, name)) is not None and not one.skipped:
            stood[counter - 1] -= stood[counter - 1] > 0
            stood[counter] += 1
    own, due = getattr(mine[step][rank], name), getattr(twins[step][rank], name) if rank in twins[step] else None
    if own is None or due is None or own == due or not (stood[own - 1] > 0 and stood[due - 1] > 0):
        return ""
    claim = "turn" if name == "opt_step" else "turn by schedule"
    return "" if are_same(mine[step], twins[step]) else said(claim, step=step, ours=own, theirs=due)


def _by_gradients(mine: StepTable, twins: StepTable, every: StepTable) -> str:
    """A clause about skipped iterations, shown by cleared gradients: the job cleared gradients without an optimizer
    step more or less often than the twin, and the samples of the next step are those of an iteration that is later, or
    earlier, by the difference. (A job that warms up or tries a step again clears gradients too, but its samples stay as
    they are.) `every`: all steps of the run."""
    both = Both.of(mine, twins)
    other = both.ours.any(~both.equal("dropped"))
    iterations = _iterations(twins)
    for step in both.ours.numbers[other][:_SKIPPED_ENOUGH].tolist():
        rank = min(mine[step])
        own, due = mine[step][rank].dropped, twins[step][rank].dropped
        if own == due:
            return ""  # only some ranks dropped gradients: no iteration of the job
        since = every.only(every.numbers >= step)
        at = _iterations(since) + int(iterations[twins.numbers == step][0]) - due - 1  # the iterations of `since`
        if _are_of(since, at, twins, iterations):
            return said("dropped", ours=own, theirs=due, step=step)
    return ""


def _iterations(steps: StepTable) -> Array:
    """For each step, how many iterations were made until it ended, skipped iterations among them."""
    return np.cumsum(1 + steps.most(steps.executions.column("dropped")))


def _are_of(since: StepTable, at: Array, twins: StepTable, iterations: Array) -> bool:
    """Whether the first of these steps has the samples of the twin's step that made the same iteration.

    If the twin skipped that iteration, the first step must have other samples than in the twin, and the next step whose
    iteration the twin made must have that iteration's samples. If the twin ended before, the first step must have
    samples that the twin never used."""
    common, ours, theirs = np.intersect1d(at, iterations, return_indices=True)
    if not all_known(first := since[int(since.numbers[0])]):
        return False
    if len(common):
        by_rank, others = since[int(since.numbers[ours[0]])], twins[int(twins.numbers[theirs[0]])]
        if all_known(by_rank) and all_known(others) and are_same(by_rank, others):
            return not ours[0] or not are_same(first, twins[int(since.numbers[0])])
        return False
    own = counts_of(first)
    return bool(own) and not own.keys() & total_of(twins.values(), digests_of).keys()


def _by_schedule(mine: StepTable, twins: StepTable) -> str:
    """A clause: the run skipped another number of iterations than the twin. Empty if nothing shows it.

    Some learning rate schedules count every iteration, also one without an optimizer step. So skipped iterations show
    if, in one step, the schedule's counter grew by another number than in the twin, the optimizer's counter is the
    same, and the samples differ. A schedule that was not restored does not count: it differs already in the first step
    of an attempt."""
    for step in np.intersect1d(mine.numbers, twins.numbers).tolist():
        if step - 1 not in mine or step - 1 not in twins:
            continue
        rank = min(mine[step])
        own, before = (mine[at].get(rank) for at in (step, step - 1))
        other, before_there = (twins[at].get(rank) for at in (step, step - 1))
        if own is None or before is None or other is None or before_there is None:
            continue
        counters = own.sched_step, other.sched_step, before.sched_step, before_there.sched_step
        if None in counters or own.sched_step == other.sched_step:
            continue
        if before.sched_step != before_there.sched_step or before.attempt != own.attempt:
            return ""
        went_on = [(one.sched_step or 0) - (before.sched_step or 0) for one in (own, other)]
        is_shown = min(went_on) >= 1 and own.opt_step == other.opt_step and own.samples != other.samples
        return said("skips", step=step, ours=went_on[0], theirs=went_on[1]) if is_shown else ""
    return ""
