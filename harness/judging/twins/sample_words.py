"""Explains in words how the samples of a run differ from those of its twin, or of an earlier execution of the same
steps: skipped, rewound, or consumed in another order."""

from __future__ import annotations

from collections.abc import Collection

from torchaos.harness.contracts import Finding, First, What, failed
from torchaos.harness.judging.checkpoints.torn import torn
from torchaos.harness.judging.claims import said
from torchaos.harness.judging.noise.quantities import Steps
from torchaos.harness.judging.twins.samples import (
    Read,
    Samples,
    any_summed,
    counts_of,
    different,
    digests_of,
    named,
    reader,
    steps_like,
    total_of,
)
from torchaos.harness.record.history import History, StepTable
from torchaos.harness.record.steps.samples import sums_of
from torchaos.harness.record.words import counted

ONE_SUM = "of some steps only the sum of the samples was kept, because the run is large"


def differs(history: History, ours: StepTable, theirs: StepTable, step: int) -> Finding:
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
    told = f"{story(history, ours, theirs, step, read, skipped)} {_sum(skipped, repeated)}"
    return failed(told, First(What.SAMPLES, step), **measured)


def differ_somehow(ours: StepTable, theirs: StepTable, step: int) -> Finding:
    """As differs, if only the sum of the samples was kept of some steps. Then it is not known how many samples were
    skipped or repeated in all."""
    mine, twins = ours.get(step, {}), theirs.get(step, {})
    due, got = (sum(sums_of(execution).in_samples for execution in by_rank.values()) for by_rank in (twins, mine))
    unknown = f"{ONE_SUM.capitalize()}, so it is not known how many samples were skipped or repeated."
    if step not in ours:
        reason = f"the final history has no step {step}, which consumed {counted(due, 'sample')} in the twin. {unknown}"
        return failed(reason, First(What.ABSENT, step), step=step)
    if step not in theirs:
        return failed(f"step {step} was done after the twin's last step ({max(theirs)}), with samples of its own")
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


def story(
    history: History, ours: Steps, theirs: Steps, step: int, read: Read, skipped: Samples | None = None,
    other: str = "the twin",
) -> str:  # fmt: skip
    """The most likely explanation of the first step whose samples differ from those of `other`. `skipped`: the samples
    that were not consumed later either; None if that is not known."""
    got, due = counts_of(ours[step], read), counts_of(theirs[step], read)
    attempt = history.attempt(next(iter(ours[step].values())).attempt)
    base = attempt.base if attempt and attempt.number else None
    resumed = f"after the resume from step {base}" if base is not None else "without any restart before it"
    mixed = torn(history, attempt.segments[0]) if attempt and attempt.segments else ""
    if got.total() != due.total():
        return (
            f"step {step} consumed {got.total()} samples and {due.total()} in {other}, on {len(ours[step])} and "
            f"{len(theirs[step])} ranks: the global batch changed {resumed}."
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


def _sum(skipped: Samples, repeated: Samples) -> str:
    if not skipped and not repeated:
        return "In the end each sample was consumed as often as in the twin."
    if not skipped:
        return f"In all, none was skipped and {counted(repeated.total(), 'sample', 'was/were')} consumed too often."
    return (
        f"In all, {counted(skipped.total(), 'sample', 'was/were')} skipped and {repeated.total()} consumed too often."
    )
