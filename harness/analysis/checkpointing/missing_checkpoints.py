"""Finds the checkpoints of the twin that the run lacks or has at another step, and those that the job declared complete
although they are not."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, Clash, is_below, root_of
from torchaos.harness.analysis.checkpointing.resume_points import family, lacking, moved, points_of
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history.saves_and_loads import final_path
from torchaos.harness.record.record import Record

# Finds checkpoints that the job itself declared complete although they are not.


def claimed_whole(run: Record, ours: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints that are damaged, whose save failed, and that the job then renamed to the usual name of a complete
    checkpoint. A checkpoint that had its final name from the start is not reported, because the job may write a further
    file last to show that it is complete. A checkpoint whose save succeeded is not reported either, because it may have
    been damaged later."""
    named = {posixpath.normpath(str(event.data["to"])) for event in run.of_kind(Kind.RENAMED)}
    failed, went_well = ({save.path for save in run.history.saves if save.ok is ok} for ok in (False, True))
    suspects, whole = (named & failed) - went_well, {family(checkpoint.path) for checkpoint in ours if checkpoint.good}
    return [
        checkpoint
        for checkpoint in ours
        if not checkpoint.good and family(checkpoint.path) in whole
        if posixpath.join(root_of(run), checkpoint.path) in suspects
    ]


# Finds the checkpoints of the twin that the run lacks or has at another step, and the possible excuses.


def strays(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Clash]:
    """Checkpoints of the twin that the run lacks, or has under the same path at another step."""
    both = [*((None, other) for other in lacking(ours, theirs)), *moved(ours, theirs)]
    return [_stray(own, other) for own, other in both]


def _stray(own: Checkpoint | None, other: Checkpoint) -> Clash:
    there = own or other
    return Clash(there.step, there.path, "checkpoint", there.path, _step(own) if own else None, _step(other))


def _step(checkpoint: Checkpoint) -> str:
    return "an unknown step" if checkpoint.step is None else f"step {checkpoint.step}"


def unexcused(
    run: Record, twins: Sequence[Record], ours: Sequence[Checkpoint], theirs: Sequence[Sequence[Checkpoint]]
) -> list[Clash]:
    """The checkpoints that all twins have and that the run lacks, or has at another step. Three kinds are left out:
    checkpoints that were saved on another number of ranks; checkpoints of the steps from which an attempt resumed,
    because a save of such a step may have been interrupted and is not repeated; and checkpoints whose save failed, for
    example without free space, if the job continued."""
    found = {stray.path: stray for stray in strays(ours, theirs[0])}
    for other in theirs[1:]:
        same = {stray.path: stray.theirs for stray in strays(ours, other)}
        found = {path: clash for path, clash in found.items() if same.get(path) == clash.theirs}
    bases = {attempt.base for attempt in run.history.attempts[1:]}
    return [
        clash
        for clash in found.values()
        if not of_another_world(run, twins[0], clash.step)
        and not (clash.ours is None and clash.step in bases and not _was_resumed_from(run, clash))
        and not (clash.ours is None and _could_not_be_saved(run, clash))
    ]


def _could_not_be_saved(run: Record, clash: Clash) -> bool:
    path = posixpath.join(root_of(run), clash.path)
    made = {execution.attempt for execution in run.history.by_step().get(clash.step or 0, {}).values()}
    saves = [save for save in run.history.saves if save.attempt in made and is_below(final_path(save.path), path)]
    return any(not save.ok for save in saves)


def _was_resumed_from(run: Record, clash: Clash) -> bool:
    path = posixpath.join(root_of(run), clash.path)
    return any(is_below(attempt.loaded, path) for attempt in run.history.attempts if attempt.loaded)


def is_aside(run: Record, clash: Clash) -> bool:
    """Whether the job never resumes from this checkpoint. It is kept for another purpose, as `best.pt` is, and a metric
    may decide when it is saved."""
    return not points_of(run).has(posixpath.join(root_of(run), clash.path))


def of_another_world(run: Record, twin: Record, step: int | None) -> bool:
    """Whether the checkpoint was saved on another number of ranks than the twin's. Then sums are in another order, and
    the states of single ranks belong to other ranks."""
    saved = [save.attempt for save in run.history.saves if save.global_step == step]
    made = [execution.attempt for execution in run.history.by_step().get(step or 0, {}).values()]
    sizes = {attempt.number: attempt.world_size for attempt in run.history.attempts}
    theirs = {attempt.world_size for attempt in twin.history.attempts}
    return bool(saved or made) and sizes.get((saved or made)[-1]) not in theirs
