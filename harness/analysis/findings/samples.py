"""Whether samples were consumed as in the twin: none skipped, none repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import before, common, history_of, unreported, until
from torchaos.harness.analysis.comparison.losses import without_data
from torchaos.harness.analysis.comparison.sample_counts import (
    FirstUses,
    all_known,
    are_copied,
    are_same,
    are_summed,
    by_index,
    came_earlier,
    have_other_contents,
    in_order,
    indices_of,
    not_surely_same,
    other_iterations,
    ranges,
    reader,
    without_copies,
)
from torchaos.harness.analysis.comparison.sample_reasons import (
    ONE_SUM,
    Computed,
    are_of_another_part,
    as_iterations_in_words,
    differ_somehow,
    differs,
    equal_but_for_rounding,
    in_words,
    inputs_at_resume,
    lack_what_no_loss_used,
    other_inputs,
    story,
)
from torchaos.harness.analysis.ending import final_step, teardown_aborts
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.replica_verdict import absences, absent_replicas, as_one_job
from torchaos.harness.interfaces import Finding, First, Outcome, What, failed, inconclusive, passed
from torchaos.harness.record.history import History, StepTable
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.execution import sums_of

_BLIND = "without a twin, samples that were skipped in steps that were done only once can't be found"


def samples(run: Record, twins: Sequence[Record]) -> Finding:
    """Judges whether each step consumed the twin's samples; without a twin, whether steps that were done again consumed
    the same samples, and no batch was consumed twice in one epoch."""
    history = history_of(run, twins)
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
    blind = unreported(history, ours, twin.history, theirs)
    other = inputs_at_resume(run, twin)
    found = _against(history, ours, theirs, early, blind, other.told)
    if other.carried and found.first == First(What.SAMPLES, other.step):
        return failed(other.carried, found.first, step=other.step)
    return found


def samples_of_absent(run: Record, twins: Sequence[Record], most: int | None = None) -> Finding | None:
    """Judges the steps from which a replica was absent: the others must have consumed its samples, or else exactly
    their own samples as in the twin. None if all replicas made all steps. `most`: how many samples of absent replicas
    may be consumed by nobody; without it, such samples make the finding inconclusive."""
    gone = absent_replicas(run)
    if gone is None:
        return None
    if not twins:
        return inconclusive(f"{gone}, and without a twin nothing shows which samples the others should have seen")
    if are_taken_over(run, twins):
        finding = samples(as_one_job(run), [as_one_job(twin) for twin in twins])
        return replace(finding, reason=f"{gone}, and the others took over its samples: {finding.reason}")
    parts, theirs = run.of_replicas, twins[0].of_replicas
    for number, (own, twin) in enumerate(zip(parts, theirs, strict=True)):
        found = _in_its_steps(own, twin, {step for step, who in absences(parts).items() if number in who})
        if found is not None:
            return replace(found, reason=f"replica {number}: {found.reason}")
    left_out = sum(
        sums_of(execution).in_samples
        for step, who in absences(parts).items() for number in who
        for execution in theirs[number].history.by_step().get(step, {}).values()
    )  # fmt: skip
    words = (
        f"each replica consumed the twin's samples in the steps that it made; {gone}, and nobody consumed its "
        f"{counted(left_out, 'sample')}"
    )
    if most is None:
        return inconclusive(f"{words}: lost, or the job is built so", skipped=left_out, repeated=0)
    if left_out > most:
        first = next(iter(absences(parts)))
        return failed(f"{words}; {most} may be skipped", First(What.SAMPLES, first), skipped=left_out, repeated=0)
    return passed(f"{words}, as is allowed", skipped=left_out, repeated=0)


def are_taken_over(run: Record, twins: Sequence[Record]) -> bool:
    """Whether replicas consumed more samples than in the twin, in a step from which another replica was absent."""
    parts, theirs = run.of_replicas, [as_one_job(twin).history.by_step() for twin in twins[:1]]
    gone = absences(parts)
    if not gone or not theirs:
        return False
    ours = as_one_job(run).history.by_step()
    return any(
        sums_of(one).in_samples > sums_of(other).in_samples
        for step in gone
        for rank, one in ours[step].items()
        if (other := theirs[0].get(step, {}).get(rank)) is not None
    )


def _in_its_steps(own: Record, twin: Record, gone: Collection[int]) -> Finding | None:
    """How the samples of one replica differ from the twin's, in the steps that the replica made. None: they do not
    differ."""
    theirs = twin.history.by_step().without(gone)
    ours, landed = own.history.by_step(), landings(own)
    early = before(own.history, landed[0].at_s) if landed else ours
    finding = _against(own.history, ours, theirs, early, unreported(own.history, ours, twin.history, theirs))
    return None if finding.outcome is Outcome.PASSED else finding


def _without_samples(ours: StepTable, theirs: StepTable) -> list[int]:
    """The steps whose samples are seen on no rank, in the run and in the twin: another model is trained in them, such
    as the probe of an evaluation. Empty if most steps are like this: then the job's own samples are not seen."""
    silent = [
        step for step in set(not_surely_same(ours, theirs)) & ours.keys() & theirs.keys()
        if not any(one.samples_seen or one.sums for table in (ours, theirs) for one in table[step].values())
    ]  # fmt: skip
    return sorted(silent) if 2 * len(silent) < len(ours) else []


def _against(
    history: History, ours: StepTable, theirs: StepTable, early: StepTable, blind: Collection[int], made: str = ""
) -> Finding:  # fmt: skip
    """The finding about the samples. `made`: a clause if the job made other inputs of its samples than in the twin."""
    stages = without_data(ours, theirs)
    ours, theirs, early = (table.without_ranks(stages) for table in (ours, theirs, early))
    if len(Both.of(ours, theirs).apart) and are_copied(theirs):  # a pipeline may be divided into stages anew
        ours, theirs, early = (without_copies(table) for table in (ours, theirs, early))
    if invalid := _differ_already(early, theirs):
        return invalid
    silent, every = _without_samples(ours, theirs) if not blind else [], (ours, theirs)
    ours, theirs = (table.without(silent) if silent else table for table in every)
    other = [
        step for step in not_surely_same(ours, theirs)
        if not lack_what_no_loss_used(ours.get(step, {}), theirs.get(step, {}))
    ]  # fmt: skip
    if not blind and _had_no_effect(ours, theirs, other):
        return passed(
            f"in {_steps(other)} the data loader handed out other batches than in the twin, and losses and parameters "
            "are the twin's bit for bit: the job does not train on its batches in the order in which it takes them. "
            f"The samples of the other {counted(len(ours) - len(other), 'step')} were consumed exactly as in the twin",
            samples=_total(ours.without(other)), skipped=0, repeated=0, not_compared=len(other),
        )  # fmt: skip
    rounded: dict[int, str] = {}
    if odd := _first_odd(history, ours, theirs, other, blind, rounded):
        skips = other_iterations(*every, odd.first.step) if silent and odd.first else ""  # the silent steps show it
        return replace(odd, reason=as_iterations_in_words(odd.first.step, skips)) if odd.first and skips else odd
    if rounded:
        return passed(
            f"the samples of {len(ours) - len(rounded)} steps were consumed exactly as in the twin. The samples of "
            f"{_steps([*rounded])} {next(iter(rounded.values()))}, from parameters that differ by rounding, so that "
            "their digests can't be compared. The losses agree except for rounding",
            samples=_total(ours.without(rounded)), skipped=0, repeated=0, not_compared=len(rounded),
        )  # fmt: skip
    total, spared = _total(ours), ", ".join(map(str, sorted(stages)))
    left_out = f"; rank {spared} has no samples and no loss, in the run or in the twin, and was left out"
    exactly = "given to the job as in the twin" if made else "consumed exactly as in the twin"
    return passed(
        f"all {counted(total, 'sample')} of {len(ours)} steps were {exactly}: none of them skipped or repeated"
        f"{f'; but {made}' if made else ''}"
        f"{left_out if stages else ''}"
        f"{f'; in {_steps(silent)}, no sample is seen in the twin either' if silent else ''}"
        f"{f'. {ONE_SUM.capitalize()}; these sums are equal' if are_summed(ours, theirs) else ''}",
        samples=total, skipped=0, repeated=0,
    )  # fmt: skip


def _differ_already(early: StepTable, theirs: StepTable) -> Finding | None:
    """The finding if a step before the first fault (`early`) consumed other samples than the twin, which then can't be
    used. None if there is no such step."""
    doubtful = [step for step in not_surely_same(early, theirs) if step in early and step in theirs]
    whole = [step for step in doubtful if early[step].keys() >= theirs[step].keys()]
    seen = [step for step in whole if all_known(early[step]) and all_known(theirs[step])]
    invalid = next((step for step in seen if not are_same(early[step], theirs[step])), None)
    if invalid is None:
        return None
    return inconclusive(
        "the twin can't be compared with this run: other samples were consumed already before any fault, first in "
        f"step {invalid}. Give the job a fixed seed.",
        First(What.SAMPLES, invalid),
        step=invalid,
    )


def _first_odd(
    history: History, ours: StepTable, theirs: StepTable, other: Sequence[int], blind: Collection[int],
    rounded: dict[int, str],
) -> Finding | None:  # fmt: skip
    """The finding about the first step that consumed other samples than in the twin; if there is none, about the first
    step of which this is not known. `other`: the steps whose samples may differ. Adds the steps whose samples differ
    only by rounding, because the job computes them, to `rounded`, each with a clause."""
    by_sum, unseen = are_summed(ours, theirs), None
    contents = partial(in_order, by_sum=by_sum)
    times = cache(lambda: Counter(map(contents, theirs.values())))
    computed = Computed(history, ours, theirs)
    for step in sorted({*other, *(step for step in blind if step in ours or step in theirs)}):
        mine, twins = ours.get(step, {}), theirs.get(step, {})
        if step in blind or not (all_known(mine) and all_known(twins)):
            unseen = unseen or inconclusive(f"the samples of step {step} were not all seen")
        elif not are_same(mine, twins) and not (contents(mine) == contents(twins) and times()[contents(twins)] == 1):
            follows = computed.follows(step)
            alike = not follows and computed.are_named_alike(step)
            if (follows or alike) and (is_rounding := computed.may_be_rounded(step)) is not None:
                rounded[step] = in_words(alike)
                unseen = unseen or (None if is_rounding else _unclear(step, rounded[step]))
                continue
            if are_of_another_part(mine, twins):
                return inconclusive(said("another part", step=step), First(What.SAMPLES, step), step=step)
            differ = differ_somehow(ours, theirs, step) if by_sum else differs(history, ours, theirs, step)
            return _uneven(theirs, step) or (other_inputs(step, computed.are_few) if follows else differ)
    return unseen


def _had_no_effect(ours: StepTable, theirs: StepTable, other: Sequence[int]) -> bool:
    """Whether these steps, for which the loader gave out other samples, had the twin's losses and left the twin's
    parameters, bit for bit on all ranks. Then the samples that were trained on are the twin's: the job may take a whole
    epoch from the loader, and leave out the batches on which it had trained."""

    def is_same(step: int) -> bool:
        mine, twins = ours.get(step, {}), theirs.get(step, {})
        return (
            mine.keys() == twins.keys()
            and all_known(mine)
            and all_known(twins)
            and all(
                one.loss_seen
                and one.parameters is not None
                and (one.losses, one.parameters) == (twin.losses, twin.parameters)
                for one, twin in ((mine[rank], twins[rank]) for rank in mine)
            )
        )

    return 0 < len(other) < len(ours) and all(map(is_same, other))


def _unclear(step: int, words: str) -> Finding:
    return inconclusive(
        f"the samples of step {step} differ from the twin's. They {words}, and after a restart of three or more ranks "
        "its parameters may differ by rounding. The losses do not show whether they differ by more",
        First(What.SAMPLES, step),
        step=step,
    )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"


def _total(steps: StepTable) -> int:
    """The number of samples of these steps."""
    every = steps.executions
    seen, indices = every.column("in_seen"), every.column("in_indices")
    seen = np.where(every.column("summed"), every.column("in_samples"), seen)
    return int(np.where(indices > 0, indices, seen).sum() if by_index(steps) else seen.sum())


def _uneven(theirs: StepTable, step: int) -> Finding | None:
    """The finding about other samples in this step if the ranks of the twin made different numbers of steps: the steps
    of two runs can't be compared then. None if they did not."""
    made = Counter(theirs.executions.rank.tolist()).most_common()
    (most, many), (least, few) = made[0], made[-1]
    if many == few:
        return None
    return inconclusive(
        f"in the twin rank {most} made {counted(many, 'step')} and rank {least} made {few}, as under DDP's Join. "
        "So the steps of the two ranks are different steps, and after a restart it is not known which samples belong "
        "to which step",
        First(What.SAMPLES, step),
    )


def _alone(run: Record, history: History) -> Finding:
    """Judges a run without a twin. It compares steps that were done again with their first execution, and finds batches
    that were consumed twice in one epoch."""
    size = {attempt.number: attempt.world_size for attempt in history.attempts}
    every, summed = history.executions, history.executions.column("summed").any()
    first: list[StepTable] = []  # for each attempt, the steps that no earlier attempt had made
    redone, rounded = set[int](), set[int]()
    for attempt in sorted(every.attempts):
        own = StepTable(every.of_attempt(attempt).last_of("global_step", "rank"))
        own = own.only((own.counts >= size[attempt]) & ~own.any(~own.executions.samples_known))
        odd = set[int]()
        for old in first:
            once, twice = common(old, own)
            redone |= set(twice)
            other = {step for step in not_surely_same(once, twice) if not are_same(once[step], twice[step])}
            begun = min(twice, default=0)  # its samples come from what was restored
            spared = {
                step
                for step in other
                if step > begun and equal_but_for_rounding(once[step], twice[step], size[attempt])
            }
            odd |= other - spared
            rounded |= spared
        if odd:
            step = min(odd)
            at_s = max(one.mono_s for one in own[step].values())
            if summed:
                what = f"step {step}, done again by attempt {attempt}, consumed other samples than the first time"
                return replace(failed(what, First(What.SAMPLES, step), step=step), at_s=at_s)
            ours = {step: own[step]}
            earlier = StepTable(
                every.joined([step_table.executions for step_table in first]).last_of("global_step", "rank")
            )
            told = story(history, ours, earlier, step, reader(ours, earlier), other="the first execution")
            return replace(failed(told, First(What.SAMPLES, step), step=step), at_s=at_s)
        first.append(own.without(redone))
    if summed:
        return inconclusive(
            f"{ONE_SUM}, and there is no twin: it can't be seen whether samples were consumed twice in one epoch. "
            f"{counted(len(redone), 'step', 'that was/that were')} done again consumed the same samples as "
            "the first time."
        )
    again = _replayed(run, history)
    if again:
        return again
    if not redone:
        return inconclusive(
            "there is no twin, and no step was done twice on all ranks: nothing to compare the samples with"
        )
    alike, more = len(redone - rounded), ""
    if rounded:
        which = _steps(sorted(rounded))
        more = f"; the job computes those of {which} from parameters that differ by rounding, so they can't be compared"
    return passed(
        f"{counted(alike, 'step', 'that was/that were')} done again consumed the same samples as the "
        f"first time{more}; {_BLIND}",
        steps=alike,
    )


def _replayed(run: Record, history: History) -> Finding | None:
    """Finds a resume whose first step consumed only samples that had been consumed before, although the epoch was not
    over: at least one more batch was left. None if there is none. (drop_last leaves out less than a batch, and those
    samples may come first in a later epoch.) Equal indices with other contents prove nothing: the resume may have begun
    to count again. A job that repeated samples before any fault draws with replacement, and is not judged."""
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
