"""Was each sample consumed exactly as without the fault: none skipped, none repeated?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from torchaos.harness.judging.ending.teardown import final_step, teardown_aborts
from torchaos.harness.judging.gaps.unseen import why_unplaced, why_unseen
from torchaos.harness.judging.noise.quantities import Steps
from torchaos.harness.judging.replicas import absences, absent_in_words, why_no_steps
from torchaos.harness.judging.twins.agreement import before, common, history_of, unreported, until
from torchaos.harness.judging.twins.first_uses import FirstUses, came_earlier, indices_of
from torchaos.harness.judging.twins.samples import (
    Read,
    Samples,
    all_known,
    any_summed,
    are_same,
    are_summed,
    by_index,
    counts_of,
    different,
    digests_of,
    have_other_contents,
    in_order,
    named,
    not_surely_same,
    ranges,
    reader,
    steps_like,
    total_of,
)
from torchaos.harness.judging.twins.stages import without_data
from torchaos.harness.record.history import StepTable
from torchaos.harness.record.replicas import records_of
from torchaos.harness.record.steps.samples import sums_of
from torchaos.plugin import (
    Assertion,
    Finding,
    First,
    Harm,
    History,
    Need,
    Outcome,
    Record,
    What,
    each,
    failed,
    inconclusive,
    landings,
    passed,
)

_ONE_SUM = "of some steps only the sum of the samples was kept, because the run is large"
_BLIND = "without a twin, samples that were skipped in steps that were done only once can't be found"


@dataclass(frozen=True)
class SampleAccounting(Assertion):
    """In each global step, all ranks together consumed exactly the twin's samples; the number of ranks may change. The
    digests of the trained batches decide. The indices decide too if a digest covers several samples or a part of one (a
    packed batch); otherwise they are used only in the reason."""

    name = "sample_accounting"
    harm = Harm.WRONG_RESULT
    needs = frozenset({Need.STEPS, Need.SAMPLES, Need.TWIN})

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        history = history_of(run, twins)
        if not history.executions:
            return inconclusive(f"no step was seen: {why_unseen(run, 'steps')}")
        if not history.executions.samples_seen.any():
            return inconclusive(f"no sample was seen: {why_unseen(run, 'samples')}")
        if history.unplaced:
            return inconclusive(why_unplaced(run, history.unplaced))
        if not twins:
            return _alone(run, history)
        twin = twins[0]
        if not twin.history.executions.samples_seen.any():
            return inconclusive(f"the twin's samples were not seen: {why_unseen(twin, 'samples')}")
        theirs = until(twin.history.by_step(), final_step(twin))
        last = max(theirs, default=0)
        ours = until(history.by_step(), last if teardown_aborts(run, last) else None)
        landed = landings(run)
        early = before(history, landed[0].at_s) if landed else ours
        return _against(history, ours, theirs, early, unreported(history, ours, twin.history, theirs))

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Compares the samples that each replica consumed in its own steps with the twin's samples of these steps.
        Inconclusive if a replica was absent from a step: that its samples are lost may be a defect, or intended."""
        parts = records_of(run)
        if blind := why_no_steps(parts):
            return blind
        gone = absent_in_words(parts)
        if gone is None:
            return each(self, run, twins)
        if not twins:
            return inconclusive(f"{gone}, and without a twin nothing shows which samples the others should have seen")
        theirs = records_of(twins[0])
        for number, (own, twin) in enumerate(zip(parts, theirs, strict=True)):
            finding = _in_its_steps(own, twin, {step for step, who in absences(parts).items() if number in who})
            if finding is not None:
                return replace(finding, reason=f"replica {number}: {finding.reason}")
        left_out = sum(
            sums_of(execution).in_samples
            for step, who in absences(parts).items() for number in who
            for execution in theirs[number].history.by_step().get(step, {}).values()
        )  # fmt: skip
        return inconclusive(
            f"each replica consumed the twin's samples in the steps that it made; {gone}, and nobody consumed its "
            f"{left_out} samples: they are lost, or the job is built so",
            skipped=left_out, repeated=0,
        )  # fmt: skip


def _in_its_steps(own: Record, twin: Record, gone: Collection[int]) -> Finding | None:
    """How the samples of one replica differ from the twin's in the steps that the replica made. None: they do not
    differ."""
    theirs = twin.history.by_step().without(gone)
    ours, landed = own.history.by_step(), landings(own)
    early = before(own.history, landed[0].at_s) if landed else ours
    finding = _against(own.history, ours, theirs, early, unreported(own.history, ours, twin.history, theirs))
    return None if finding.outcome is Outcome.PASSED else finding


def _against(
    history: History, ours: StepTable, theirs: StepTable, early: StepTable, blind: Collection[int]
) -> Finding:  # fmt: skip
    stages = without_data(ours, theirs)
    ours, theirs, early = (table.without_ranks(stages) for table in (ours, theirs, early))
    doubtful = [step for step in not_surely_same(early, theirs) if step in early and step in theirs]
    whole = [step for step in doubtful if early[step].keys() >= theirs[step].keys()]
    seen = [step for step in whole if all_known(early[step]) and all_known(theirs[step])]
    invalid = next((step for step in seen if not are_same(early[step], theirs[step])), None)
    if invalid is not None:
        return inconclusive(
            "the twin can't be compared with this run: other samples were consumed already before any fault, first in "
            f"step {invalid}. Give the job a fixed seed.",
            step=invalid,
        )
    unseen, by_sum = None, are_summed(ours, theirs)
    contents = partial(in_order, by_sum=by_sum)
    times = cache(lambda: Counter(map(contents, theirs.values())))
    other = not_surely_same(ours, theirs)
    for step in sorted({*other, *(step for step in blind if step in ours or step in theirs)}):
        mine, twins = ours.get(step, {}), theirs.get(step, {})
        if step in blind or not (all_known(mine) and all_known(twins)):
            unseen = unseen or inconclusive(f"the samples of step {step} were not all seen")
        elif not are_same(mine, twins) and not (contents(mine) == contents(twins) and times()[contents(twins)] == 1):
            differ = _differ_somehow(ours, theirs, step) if by_sum else _differs(history, ours, theirs, step)
            return _uneven(theirs) or differ
    total = _total(ours)
    spared = ", ".join(map(str, sorted(stages)))
    left_out = f"; rank {spared} has no samples and no loss, in the run or in the twin, and was left out"
    return unseen or passed(
        f"all {total} samples of {len(ours)} steps were consumed exactly as in the twin: none skipped, none repeated"
        f"{left_out if stages else ''}"
        f"{f'. {_ONE_SUM.capitalize()}; these sums are equal' if by_sum else ''}",
        samples=total, skipped=0, repeated=0,
    )  # fmt: skip


def _total(steps: StepTable) -> int:
    """The number of samples, as they are named."""
    every = steps.executions
    seen, indices = every.column("in_seen"), every.column("in_indices")
    seen = np.where(every.column("summed"), every.column("in_samples"), seen)
    return int(np.where(indices > 0, indices, seen).sum() if by_index(steps) else seen.sum())


def _uneven(theirs: StepTable) -> Finding | None:
    """A reason if the ranks of the twin made different numbers of steps. Then the steps of two runs can't be
    compared."""
    made = Counter(theirs.executions.rank.tolist()).most_common()
    (most, many), (least, few) = made[0], made[-1]
    if many == few:
        return None
    return inconclusive(
        f"in the twin rank {most} made {many} steps and rank {least} made {few}, as under DDP's Join. So the steps of "
        "the two ranks are different steps, and after a restart it is not known which samples belong to which step"
    )


def _differs(history: History, ours: StepTable, theirs: StepTable, step: int) -> Finding:
    """The first step whose samples differ, and the sum of all differences over the whole history."""
    read = reader(ours, theirs)
    other = different(ours, theirs)
    mine, twins = (total_of((steps[at] for at in other if at in steps), read) for steps in (ours, theirs))
    skipped, repeated = twins - mine, mine - twins
    measured = {"step": step, "skipped": skipped.total(), "repeated": repeated.total()}
    if step not in ours:
        gone = named(counts_of(theirs[step], read))
        reason = f"the final history has no step {step}: {gone} were never consumed"
        return failed(reason, First(What.ABSENT, step), **measured)
    if step not in theirs:
        return failed(
            f"step {step} was done after the twin's last step ({max(theirs)}), with samples of its own", **measured
        )
    story = f"{_story(history, ours, theirs, step, read, skipped)} {_sum(skipped, repeated)}"
    return failed(story, First(What.SAMPLES, step), **measured)


def _differ_somehow(ours: StepTable, theirs: StepTable, step: int) -> Finding:
    """As _differs, if only the sum of the samples was kept of some steps. Then it is not known how many samples were
    skipped or repeated in all."""
    mine, twins = ours.get(step, {}), theirs.get(step, {})
    due, got = (sum(sums_of(execution).in_samples for execution in by_rank.values()) for by_rank in (twins, mine))
    unknown = f"{_ONE_SUM.capitalize()}, so it is not known how many samples were skipped or repeated."
    if step not in ours:
        reason = f"the final history has no step {step}, which consumed {due} samples in the twin. {unknown}"
        return failed(reason, First(What.ABSENT, step), step=step)
    if step not in theirs:
        return failed(f"step {step} was done after the twin's last step ({max(theirs)}), with samples of its own")
    like = sorted(steps_like(theirs, mine, digests_of), key=lambda at: (abs(at - step), at))
    if like:
        what = f"step {step} consumed the samples of step {like[0]}."
    elif got != due:
        what = f"step {step} consumed {got} samples, and {due} in the twin."
    elif any_summed(mine, twins):
        what = f"step {step} consumed other samples than in the twin: their sums differ."
    else:
        missing = (counts_of(twins) - counts_of(mine)).total()
        what = f"step {step} consumed other samples than in the twin: {missing} are missing in it."
    return failed(f"{what} {unknown}", First(What.SAMPLES, step), step=step)


def _story(
    history: History, ours: Steps, theirs: Steps, step: int, read: Read, skipped: Samples | None = None,
    other: str = "the twin",
) -> str:  # fmt: skip
    """The most likely explanation of the first step whose samples differ from those of `other`. `skipped`: the samples
    that were not consumed later either; None if that is not known."""
    got, due = counts_of(ours[step], read), counts_of(theirs[step], read)
    attempt = history.attempt(next(iter(ours[step].values())).attempt)
    base = attempt.base if attempt and attempt.number else None
    resumed = f"after the resume from step {base}" if base is not None else "without any restart before it"
    if got.total() != due.total():
        return (
            f"step {step} consumed {got.total()} samples and {due.total()} in {other}, on {len(ours[step])} and "
            f"{len(theirs[step])} ranks: the global batch changed {resumed}."
        )
    if got == due:
        return (
            f"{named(got)} in step {step} have the right indices and other contents than in {other}, {resumed}: "
            "most likely the random numbers for a sample (augmentation) come from an RNG that was not restored."
        )
    usual = _nearest(step, steps_like(StepTable.of(theirs), ours[step], read))
    if usual is None:
        return f"{_partly(ours, theirs, step, read, other, resumed)}."
    if usual > step:
        lost = total_of((theirs[at] for at in range(step, usual) if at in theirs), read)
        made_good = skipped is not None and not lost & skipped
        what = "came later than they were due," if made_good else "were skipped"
        return f"{named(lost)} {what} {resumed}: step {step} consumed the samples of step {usual}."
    why = "the data was rewound"
    if base is not None and step == base + 1 and usual == 1:
        drawn = all(isinstance(one, int) for one in got)
        likely = ": most likely the sampler restarted, or the RNG that draws the batches"
        why = f"the data starts over{likely if drawn else ''}"
    return f"{named(got)} were consumed twice, in steps {usual} and {step}, {resumed}: {why}."


def _partly(ours: Steps, theirs: Steps, step: int, read: Read, other: str, resumed: str) -> str:
    """The explanation for a step whose samples equal those of no single step of `other`."""
    got, due = counts_of(ours[step], read), counts_of(theirs[step], read)
    extra, missing = got - due, due - got
    odd = [
        rank for rank in ours[step].keys() & theirs[step].keys() if read(ours[step][rank]) != read(theirs[step][rank])
    ]
    where = f" on rank {odd[0]} alone" if len(odd) == 1 < len(ours[step]) else ""
    home = _nearest(step, {at for at in theirs if extra <= counts_of(theirs[at], read)})
    if home is not None and home > step:
        return f"{named(missing)} were skipped{where}, {resumed}: {named(extra)} of step {home} came in step {step}"
    if home is not None:
        return f"{named(extra)} were consumed twice{where}, in steps {home} and {step}, {resumed}"
    mixed = f"{other} never consumed them" if got - total_of(theirs.values(), read) else "they come in another order"
    return f"{named(got)} in step {step} are not those of {other}{where}, {resumed}: {mixed}"


def _nearest(step: int, others: Collection[int]) -> int | None:
    """The step of `others` that is nearest to `step`. There may be many such steps, if every epoch has the same
    order."""
    return min(others, key=lambda at: (abs(at - step), at), default=None)


def _alone(run: Record, history: History) -> Finding:
    """Judges a run without a twin. It compares steps that were done again with their first execution, and finds batches
    that were consumed twice in one epoch."""
    size = {attempt.number: attempt.world_size for attempt in history.attempts}
    every, summed = history.executions, history.executions.column("summed").any()
    first: list[StepTable] = []  # for each attempt, the steps that no earlier attempt had made
    redone = set[int]()
    for attempt in sorted(every.attempts):
        own = StepTable(every.of_attempt(attempt).last_of("global_step", "rank"))
        own = own.only((own.counts >= size[attempt]) & ~own.any(~own.executions.samples_known))
        odd = set[int]()
        for old in first:
            once, twice = common(old, own)
            redone |= set(twice)
            odd |= {step for step in not_surely_same(once, twice) if not are_same(once[step], twice[step])}
        if odd:
            step = min(odd)
            if summed:
                what = f"step {step}, done again by attempt {attempt}, consumed other samples than the first time"
                return failed(what, First(What.SAMPLES, step), step=step)
            ours = {step: own[step]}
            earlier = StepTable(
                every.joined([step_table.executions for step_table in first]).last_of("global_step", "rank")
            )
            story = _story(history, ours, earlier, step, reader(ours, earlier), other="the first execution")
            return failed(story, First(What.SAMPLES, step), step=step)
        first.append(own.without(redone))
    if summed:
        return inconclusive(
            f"{_ONE_SUM}, and there is no twin: it can't be seen whether samples were consumed twice in one epoch. "
            f"{len(redone)} steps that were done again consumed the same samples as the first time."
        )
    again = _replayed(run, history)
    if again:
        return again
    if not redone:
        return inconclusive(
            "there is no twin, and no step was done twice on all ranks: nothing to compare the samples with"
        )
    return passed(
        f"{len(redone)} steps that were done again consumed the same samples as the first time; {_BLIND}",
        steps=len(redone),
    )


def _replayed(run: Record, history: History) -> Finding | None:
    """Finds a resume whose first step consumed only samples that had been consumed before, although the epoch was not
    over: at least one more batch was left. (drop_last leaves out less than a batch, and those samples may come first in
    a later epoch.) Equal indices with other contents prove nothing: the resume may have begun to count again. A job
    that repeated samples before any fault draws with replacement, and is not judged."""
    steps = history.by_step()
    resumed = {attempt.base + 1 for attempt in history.attempts if attempt.number and attempt.base is not None}
    if not any(came_earlier(steps, step) for step in resumed & steps.keys()):
        return None
    first_uses = FirstUses(steps)
    repeated = first_uses.repeated()
    landed = landings(run)
    done_before = max(before(history, landed[0].at_s), default=0) if landed else max(steps, default=0)
    if any(step <= done_before for step in repeated):
        return None
    for step in sorted(resumed & repeated):
        own = indices_of(steps, step)
        once = steps[first_uses.of(own[0])]
        if first_uses.after(step) >= len(own) and not have_other_contents(steps[step], once):
            twice = f"{ranges(own)} were consumed twice in one epoch, in steps {first_uses.of(own[0])} and {step}"
            return failed(twice, First(What.SAMPLES, step), step=step)
    return None


def _sum(skipped: Samples, repeated: Samples) -> str:
    if not skipped and not repeated:
        return "In the end each sample was consumed as often as in the twin."
    if not skipped:
        return f"In all, none was skipped and {repeated.total()} were consumed too often."
    return f"In all, {skipped.total()} samples were skipped and {repeated.total()} consumed too often."
