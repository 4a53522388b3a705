"""Samples that the job computes itself, such as the observations that a policy meets, or a model's own output as its
next input. They follow from the parameters. So if parameters differ by rounding, such samples do too, and their
digests, which are exact, differ as if they were other samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torchaos.harness.agent.wire import Phase
from torchaos.harness.contracts import Finding, First, What, failed
from torchaos.harness.judging.noise.quantities import LOSS
from torchaos.harness.judging.noise.rounding import ROUNDING, may_be_rounding, rounded_from, rounds_on
from torchaos.harness.judging.twins.samples import counts_of, digests_of, total_of
from torchaos.harness.record.history import Execution, History, StepTable
from torchaos.harness.record.steps.samples import sums_of

ByRank = Mapping[int, Execution]


def may_be_computed(*steps: ByRank) -> bool:
    """Whether the job may have computed the samples of these steps: no data loader of torch gave a batch in them, and
    no sample has an index of a dataset."""
    every = [execution for by_rank in steps for execution in by_rank.values()]
    return not any(Phase.DATA in execution.phases or sums_of(execution).in_indices for execution in every)


def equal_but_for_rounding(mine: ByRank, others: ByRank, world: int) -> bool:
    """Whether samples of a step that was done again may differ from those of its first execution by rounding alone: as
    many as before, computed, on enough ranks, and with losses that agree except for rounding."""
    if not (rounds_on(world) and may_be_computed(mine, others) and _as_many(mine, others)):
        return False
    losses_seen = all(execution.loss_seen for by_rank in (mine, others) for execution in by_rank.values())
    return losses_seen and mine.keys() == others.keys() and LOSS.distance(mine, others, 0.0) <= ROUNDING


class Computed:
    """Which differing samples of a run may differ from its twin's only because parameters do."""

    def __init__(self, history: History, ours: StepTable, theirs: StepTable) -> None:
        self._history, self._ours, self._theirs = history, ours, theirs

    def follows(self, step: int) -> bool:
        """Whether the samples of the step may have been computed from parameters that differed before. In the first
        step after a restart they come from what was restored, and must be the twin's. Samples that the twin used in
        another step were not computed."""
        mine, twins = self._ours.get(step, {}), self._theirs.get(step, {})
        if not mine or not twins or self._resumed_in(step):
            return False
        other = (counts_of(mine) - counts_of(twins)).keys()
        return may_be_computed(mine, twins) and _as_many(mine, twins) and not other & self._used

    def are_named_alike(self, step: int) -> bool:
        """Whether the samples of the step have the twin's indices: none was skipped or repeated, but the job may have
        computed their contents, as for a buffer of what its policy met."""
        mine, twins = self._ours.get(step, {}), self._theirs.get(step, {})
        if mine.keys() != twins.keys() or self._resumed_in(step):
            return False
        return all(one.indices and one.indices == twins[rank].indices for rank, one in mine.items())

    def may_be_rounded(self, step: int) -> bool | None:
        """Whether rounding explains the difference, as may_be_rounding() says it of the losses. False also if losses
        were not seen."""
        first = rounded_from(self._history)
        if first is None or step < first or self._losses_agree is None:
            return None
        return self._losses_agree

    def _resumed_in(self, step: int) -> bool:
        begun = {(attempt.number, attempt.base + 1) for attempt in self._history.attempts if attempt.base is not None}
        return any((one.attempt, step) in begun for one in self._ours.get(step, {}).values())

    @cached_property
    def _losses_agree(self) -> bool | None:
        if not (self._ours.executions.loss_seen.all() and self._theirs.executions.loss_seen.all()):
            return False
        found = LOSS.distances(self._ours, self._theirs, LOSS.typical([self._theirs]))
        return may_be_rounding(found, self._history)

    @cached_property
    def _used(self) -> set[object]:
        """The digests of all samples of the twin."""
        return set(total_of(self._theirs.values(), digests_of))


def in_words(named_alike: bool) -> str:
    """A clause about samples that may be computed."""
    if named_alike:
        return "have the twin's indices and other contents: the job may compute them"
    return "have no indices and come from no data loader: the job computes them"


def other_inputs(step: int) -> Finding:
    """The failure of a step whose samples differ and may have been computed."""
    return failed(
        f"step {step} trained on other samples than in the twin, which the twin never used. They "
        f"{in_words(False)}, and they follow from what it computed before",
        First(What.COMPUTED, step), step=step,
    )  # fmt: skip


def _as_many(mine: ByRank, others: ByRank) -> bool:
    many = [{rank: sums_of(execution).in_samples for rank, execution in side.items()} for side in (mine, others)]
    return many[0] == many[1]
