"""Explains in words how the samples of a run differ from those of its twin, or of an earlier execution of the same
steps: skipped, rewound, or consumed in another order.

Some jobs compute their samples, such as the observations that a policy meets, or a model's own output as its next
input. Such samples follow from the parameters. If the parameters differ by rounding, the samples do too, and their
digests, which are exact, differ as if they were other samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torchaos.harness.analysis.checkpointing.carried_state import mixed_state
from torchaos.harness.analysis.checkpointing.restored_state import Begun, begun_with
from torchaos.harness.analysis.checkpointing.resumed_from import resumed_in_words
from torchaos.harness.analysis.checkpointing.state_differences import INPUTS
from torchaos.harness.analysis.checkpointing.state_differences import in_words as parts_in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.sample_counts import (
    Read,
    Samples,
    any_summed,
    counts_of,
    different,
    digests_of,
    ends_of,
    named,
    other_iterations,
    reader,
    steps_like,
    total_of,
)
from torchaos.harness.analysis.tolerance import LOSS, ROUNDING, Steps, may_be_rounding, rounded_from, rounds_on
from torchaos.harness.interfaces import Finding, First, What, failed
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.record.history import Execution, History, StepTable
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps.execution import sums_of

ByRank = Mapping[int, Execution]


def may_be_computed(*steps: ByRank) -> bool:
    """Whether the job may have computed the samples of these steps: no data loader of torch gave a batch in them, and
    no sample has an index of a dataset."""
    every = [execution for by_rank in steps for execution in by_rank.values()]
    return not any(Phase.DATA in execution.phases or sums_of(execution).in_indices for execution in every)


def are_of_another_part(mine: ByRank, twins: ByRank) -> bool:
    """Whether what was seen as samples of the step are inputs of another part of the model than in the twin, because
    the job calls the first part without gradients: no rank has a sample of the twin's, and the losses are equal bit for
    bit. A loss of 0 shows nothing: it may not depend on the samples."""
    return mine.keys() == twins.keys() and may_be_computed(mine, twins) and all(
        one.samples_seen and one.loss_seen and all(one.losses) and one.losses == twins[rank].losses
        and not {*one.samples} & {*twins[rank].samples}
        for rank, one in mine.items()
    )  # fmt: skip


def lack_what_no_loss_used(mine: ByRank, twins: ByRank) -> bool:
    """Whether the samples of the step lack only inputs that no loss of it used: on each rank that lacks some, they are
    the last of the twin's, and its losses are equal bit for bit. A forward after an optimizer's step is counted to the
    next step, and a save may come between."""
    pairs = [(one, twins[rank]) for rank, one in mine.items() if rank in twins]
    lacking = [pair for pair in pairs if len(pair[0].samples) < len(pair[1].samples)]
    return (
        len(pairs) == len(mine) == len(twins)
        and bool(lacking)
        and all(one.samples_seen and twin.samples_seen and one.indices == twin.indices for one, twin in pairs)
        and ends_of(mine, twins)
        and all(one.loss_seen and one.losses == twin.losses for one, twin in lacking)
    )


def equal_but_for_rounding(mine: ByRank, others: ByRank, world: int) -> bool:
    """Whether samples of a step that was done again may differ from those of its first execution by rounding alone:
    there are as many as before, the job may have computed them, there are enough ranks for rounding, and the losses
    agree except for rounding."""
    if not (rounds_on(world) and may_be_computed(mine, others) and _as_many(mine, others)):
        return False
    losses_seen = all(execution.loss_seen for by_rank in (mine, others) for execution in by_rank.values())
    return losses_seen and mine.keys() == others.keys() and LOSS.distance(mine, others, 0.0) <= ROUNDING


class Computed:
    """Knows which differing samples of a run may differ from its twin's only because the parameters do."""

    def __init__(self, history: History, ours: StepTable, theirs: StepTable) -> None:
        self._history, self._ours, self._theirs = history, ours, theirs

    def follows(self, step: int) -> bool:
        """Whether the samples of the step may have been computed from parameters that differed before. No in two cases:

        - In the first step after a restart, samples come from what was restored, and must be the twin's.

        - Samples that the twin used in another step were not computed. (This does not hold if the twin met equal
        samples within one step: then there are few different ones.)"""
        mine, twins = self._ours.get(step, {}), self._theirs.get(step, {})
        if not mine or not twins or self._resumed_in(step) or self._began_alike(step):
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
        """Whether rounding explains the difference: see may_be_rounding(), which asks it of the losses. False also if
        losses were not seen."""
        first = rounded_from(self._history)
        if first is None or step < first or self._losses_agree is None:
            return None
        return self._losses_agree

    def _began_alike(self, step: int) -> bool:
        """Whether the parameters and the optimizer's moments at the beginning of the step are known and equal to the
        twin's, on all ranks. Then they are not the reason if the samples differ."""
        mine, twins = self._ours.get(step - 1, {}), self._theirs.get(step - 1, {})
        if not mine or mine.keys() != twins.keys():
            return False
        pairs = [((one.parameters, one.moments), (twins[r].parameters, twins[r].moments)) for r, one in mine.items()]
        return all(own == other and None not in own for own, other in pairs)

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
    def are_few(self) -> bool:
        """Whether most steps have equal samples in the batch of a rank. Then the job has few different samples, such as
        the positions in a small game, and may compute one that the twin used, too."""
        own = [digests_of(step) for step in self._theirs.executions]
        return 2 * sum(len(set(samples)) < len(samples) for samples in own) > len(own)

    @cached_property
    def _used(self) -> set[object]:
        """The digests of the twin's samples that are proof: a sample with such a digest was not computed."""
        return set() if self.are_few else set(total_of(self._theirs.values(), digests_of))


class OtherInputs(NamedTuple):
    """The first resume that begins with other inputs of the model than before, or than in the twin: clauses about it,
    and its first step. All fields are empty (step 0) if there is no such resume."""

    told: str = ""  # a clause; empty if there is no such resume
    carried: str = ""  # a clause, if some inputs were the right ones and no data loader gave them
    step: int = 0  # global


def inputs_at_resume(run: Record, twin: Record) -> OtherInputs:
    for part in run.history.segments:
        if part.base:
            begun = begun_with(run, part.number, part.base, part.started_s, twin)
            if others := begun.of(INPUTS):
                told = said("other inputs", found=parts_in_words(others, _world(run)), step=part.base + 1)
                return OtherInputs(told, carried_inputs(run, begun), part.base + 1)
    return OtherInputs()


def carried_inputs(run: Record, begun: Begun) -> str:
    """If some inputs of the model are the right ones: a clause about the others, which are then no samples of a data
    loader. Empty if there are none, or if a data loader gave them."""
    if not begun.some_inputs or not may_be_computed(run.history.by_step().get(begun.base + 1, {})):
        return ""
    return said("some inputs", found=parts_in_words(begun.some_inputs, _world(run)), step=begun.base + 1)


def _world(run: Record) -> int:
    return max((len(one.ranks) for one in run.history.attempts), default=0)


def in_words(named_alike: bool) -> str:
    """A clause about samples that may be computed."""
    if named_alike:
        return "have the twin's indices and other contents: the job may compute them"
    return "have no indices and come from no data loader: the job may compute them"


def other_inputs(step: int, are_few: bool) -> Finding:
    """The failure of a step whose samples differ and may have been computed. `are_few`: see Computed."""
    new = "" if are_few else ", which the twin never used"
    return failed(
        f"step {step} trained on other samples than in the twin{new}. They "
        f"{in_words(False)}, and then they may follow from what differed before",
        First(What.COMPUTED, step), step=step,
    )  # fmt: skip


def _as_many(mine: ByRank, others: ByRank) -> bool:
    many = [{rank: sums_of(execution).in_samples for rank, execution in side.items()} for side in (mine, others)]
    return many[0] == many[1]


ONE_SUM = "of some steps only the sum of the samples was kept, because the run is large"


def differs(history: History, ours: StepTable, theirs: StepTable, step: int) -> Finding:
    """The finding that names the first step whose samples differ, and how many samples were skipped and repeated in the
    whole run."""
    read = reader(ours, theirs)
    other = different(ours, theirs)
    mine, twins = (total_of((steps[at] for at in other if at in steps), read) for steps in (ours, theirs))
    skipped, repeated = twins - mine, mine - twins
    known = total_of(theirs.values(), read)
    # The twin did not reach them. A job may use each sample several times, as PPO does.
    most = max(known.values(), default=1)
    new = Samples({sample: min(times, most) for sample, times in repeated.items() if not known[sample]})
    repeated -= new
    measured = {"step": step, "skipped": skipped.total(), "repeated": repeated.total()}
    if alone := _of_one_alone(ours, theirs, step):
        return replace(alone, measured={**measured, "repeated": 0})  # a step that only one of them made repeats nothing
    if skips := other_iterations(ours, theirs, step):
        return failed(as_iterations_in_words(step, skips), First(What.SAMPLES, step), **measured)
    total = _sum(skipped, repeated, new)
    if new and not repeated and skipped.total() == new.total() and may_be_computed(ours[step]):
        total = f"In all, {counted(new.total(), 'sample', 'is/are')} not the twin's."  # other contents, in their places
        measured = {"step": step, "other": new.total()}
    if _is_rest(ours, theirs, step) and skipped == counts_of(theirs[step], read) - counts_of(ours[step], read):
        total = f"No step has the other {skipped.total()}."
    told = f"{story(history, ours, theirs, step, read, skipped)} {total}"
    return failed(told, First(What.SAMPLES, step), **measured)


def as_iterations_in_words(step: int, skips: str) -> str:
    """`skips`: what `other_iterations` says."""
    return f"the samples of step {step} are not those of the twin, as those of later steps: {skips}."


def differ_somehow(ours: StepTable, theirs: StepTable, step: int) -> Finding:
    """Like `differs`, but for a run that kept only the sum of the samples of some steps. Then it is not known how many
    samples were skipped or repeated in all."""
    mine, twins = ours.get(step, {}), theirs.get(step, {})
    due, got = (sum(sums_of(execution).in_samples for execution in by_rank.values()) for by_rank in (twins, mine))
    unknown = f"{ONE_SUM.capitalize()}, so it is not known how many samples were skipped or repeated."
    if alone := _of_one_alone(ours, theirs, step):
        return replace(alone, reason=f"{alone.reason}. {unknown}")
    if skips := other_iterations(ours, theirs, step):
        return failed(f"the samples of step {step} are not those of the twin: {skips}.", First(What.SAMPLES, step))
    like = sorted(steps_like(theirs, mine, digests_of), key=lambda at: (abs(at - step), at))
    if like:
        what = f"step {step} consumed the samples of step {like[0]}."
    elif got != due:
        what = f"step {step} consumed {counted(got, 'sample')}, and {due} in the twin."
    elif any_summed(mine, twins):
        what = f"step {step} consumed other samples than in the twin: their sums differ."
    else:
        missing = (counts_of(twins) - counts_of(mine)).total()
        what = f"step {step} consumed other samples than in the twin: {missing} are missing in it."
    return failed(f"{what} {unknown}", First(What.SAMPLES, step), step=step)


def _of_one_alone(ours: StepTable, theirs: StepTable, step: int) -> Finding | None:
    """The failure if only the run, or only the twin, made this step; None if both did."""
    if step in ours and step in theirs:
        return None
    mine, last, twins = step in ours, max(ours, default=0), max(theirs, default=0)
    alone = [at for at in (ours if mine else theirs) if at > (twins if mine else last)]
    if step not in alone:
        who = "the final history" if step in theirs else "the twin"
        return failed(f"{who} has no step {step}", First(What.ABSENT, step), step=step)
    many = sum(sums_of(one).in_samples for at in alone for one in (ours if mine else theirs)[at].values())
    which = f"step {step}" if len(alone) == 1 else f"{len(alone)} steps ({alone[0]} to {alone[-1]})"
    ends = f"the job's last step is {last}, and the twin's {twins}"
    consumed = f"consumed {counted(many, 'sample')}{'' if mine else ' in the twin, and never took place'}"
    return failed(f"{ends}: {which} {consumed}", First(What.LAST, step), step=step)


def story(
    history: History, ours: Steps, theirs: Steps, step: int, read: Read, skipped: Samples | None = None,
    other: str = "the twin",
) -> str:  # fmt: skip
    """The most likely explanation of the first step whose samples differ from those of `other`. `skipped`: the samples
    that no later step consumed either; None if that is not known."""
    got, due = counts_of(ours[step], read), counts_of(theirs[step], read)
    one = next(iter(ours[step].values()))
    part = next((part for part in history.segments if (part.number, part.after) == (one.attempt, one.segment)), None)
    base = part.base if part and (part.number or part.after) else None
    resumed, mixed = resumed_in_words(history, one), mixed_state(history, part) if part else ""
    if base is not None and step == base + 1 and _is_rest(ours, theirs, step):
        return said("rest", step=step, ours=got.total(), theirs=due.total(), other=other)
    if got.total() != due.total():
        is_usual = any(counts_of(by_rank, read).total() == got.total() for by_rank in theirs.values())
        what = ", as other steps do," if is_usual else ": the global batch changed"
        return (
            f"step {step} consumed {got.total()} samples and {due.total()} in {other}, on {len(ours[step])} and "
            f"{len(theirs[step])} ranks{what} {resumed}."
        )
    if got == due:
        return said("samples altered", samples=named(got), step=step, other=other, resumed=resumed)
    usual = _nearest(step, steps_like(StepTable.of(theirs), ours[step], read))
    if usual is None:
        return f"{_partly(ours, theirs, step, read, other, resumed)}."
    if usual > step:
        lost = total_of((theirs[at] for at in range(step, usual) if at in theirs), read)
        made_good = skipped is not None and not lost & skipped
        what = "came later than they were due," if made_good else "were skipped"
        return f"{named(lost)} {what} {resumed}: {mixed or f'step {step} consumed the samples of step {usual}'}."
    why = mixed or said("data rewound")
    if not mixed and base is not None and step == base + 1 and usual == 1:
        drawn = all(isinstance(one, int) for one in got)
        why = said("sampler anew" if drawn else "data anew")
    return f"{named(got)} were consumed twice, in steps {usual} and {step}, {resumed}: {why}."


def _is_rest(ours: Steps, theirs: Steps, step: int) -> bool:
    """Whether the step did only the rest of a step of the other side."""
    mine, twins = ours[step], theirs[step]
    many = [sum(sums_of(execution).in_samples for execution in side.values()) for side in (mine, twins)]
    return mine.keys() == twins.keys() and 0 < many[0] < many[1] and ends_of(mine, twins)


def _partly(ours: Steps, theirs: Steps, step: int, read: Read, other: str, resumed: str) -> str:
    """The explanation for a step whose samples equal those of no single step of `other`."""
    got, due = counts_of(ours[step], read), counts_of(theirs[step], read)
    extra, missing = got - due, due - got
    if (last := _until_made_good(ours, theirs, step, read)) is not None:
        return f"steps {step} to {last} consumed the samples that they consumed in {other}, in another order, {resumed}"
    odd = [
        rank for rank in ours[step].keys() & theirs[step].keys() if read(ours[step][rank]) != read(theirs[step][rank])
    ]
    where = f" on rank {odd[0]} alone" if len(odd) == 1 < len(ours[step]) else ""
    home = _nearest(step, {at for at in theirs if extra <= counts_of(theirs[at], read)})
    if home is not None and home > step:
        return f"{named(missing)} were skipped{where}, {resumed}: {named(extra)} of step {home} came in step {step}"
    if home is not None:
        return f"{named(extra)} were consumed twice{where}, in steps {home} and {step}, {resumed}"
    known = total_of(theirs.values(), read)
    new = sum(times for sample, times in extra.items() if not known[sample])
    mixed = f"other samples were drawn, which {other} consumed in other steps"
    if new:
        mixed = f"{other} never consumed {'them' if new == extra.total() else f'{new} of them'}"
        if new == extra.total() and may_be_computed(ours[step], theirs[step]):
            mixed += ", and no data loader gave them: the job may compute them"
    which = named(extra)
    if extra != got and not any(isinstance(sample, int) for sample in extra):
        which = f"{extra.total()} of {counted(got.total(), 'sample')}"
    return f"{which} in step {step} are not those of {other}{where}, {resumed}: {mixed}"


def _until_made_good(ours: Steps, theirs: Steps, step: int, read: Read) -> int | None:
    """The first later step until which the steps since `step` have, in all, the samples that they have in `theirs`."""
    ahead = Samples()  # how much more often than in `theirs` a sample was consumed until now
    while step in ours and step in theirs:
        got, due = counts_of(ours[step], read), counts_of(theirs[step], read)
        ahead.update(got)
        ahead.subtract(due)
        for sample in got | due:
            if not ahead[sample]:
                del ahead[sample]
        if not ahead:
            return step
        step += 1
    return None


def _nearest(step: int, others: Collection[int]) -> int | None:
    """The step of `others` that is nearest to `step`. There may be many such steps, if every epoch has the same
    order."""
    return min(others, key=lambda at: (abs(at - step), at), default=None)


def _sum(skipped: Samples, repeated: Samples, new: Samples) -> str:
    """`new`: samples that the twin never consumed."""
    if not skipped and not repeated and not new:
        return "In the end each sample was consumed as often as in the twin."
    beyond = f", and {new.total()} consumed that the twin never consumed" if new else ""
    if not skipped:
        many = f"{counted(repeated.total(), 'sample', 'was/were')} consumed too often"
        return f"In all, none was skipped{f' and {many}' if repeated or not new else ''}{beyond}."
    again = f" and {repeated.total()} consumed too often" if repeated or not new else ""
    return f"In all, {counted(skipped.total(), 'sample', 'was/were')} skipped{again}{beyond}."
