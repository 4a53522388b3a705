"""Finds the checkpoint from which each attempt resumed, those from which it could have resumed, and ranks that resumed
from another step than the others.

Only files that the job resumes from count as checkpoints (resume_points.py). A checkpoint is complete if all its files
were seen to be written to their end, or the next attempt loaded them, and if it has as many files as most other
checkpoints. The job may do more before it trusts a checkpoint, such as a rename or a digest. So a checkpoint is *sure*
only in these cases: the ranks that wrote it then trained on or saved again in the same attempt; or the processes that
were forked to write it ended successfully; or the next attempt resumed from its step. If a checkpoint lacks files
although all ranks wrote a part of it, it may be incomplete, or the other checkpoints may have extra files. Such a
checkpoint counts, but is never sure.

Ranks resume from different steps if each takes its own newest file. A rank may load an older file and then get the
state of another rank. The optimizer's own counter shows which state a rank continued with."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Deltas, is_below, out_of_reach, root_of
from torchaos.harness.analysis.checkpointing.damage_reaction import Damage, damages
from torchaos.harness.analysis.checkpointing.resume_points import Points, points_of
from torchaos.harness.analysis.claims import said
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import checkpoint_of, main_first, number_in_name
from torchaos.harness.record.history import Attempt, Execution, History, Load, Save, Segment, saved_as
from torchaos.harness.record.history.step_evidence import OPTIMIZER, RECORD, SAMPLES, Witness
from torchaos.harness.record.record import Record

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint with all its files, as the saves of the run show it."""

    step: int  # global
    path: str
    attempt: int
    whole_s: float  # when the last file of the checkpoint was written, CLOCK_MONOTONIC
    sure: bool  # the checkpoint is certainly complete
    lacks: tuple[str, ...] = ()  # files that most other checkpoints have
    went_on: bool = True  # the ranks that saved it trained on, or saved again
    late: bool = False  # training went on during the save: it may hold the state of an earlier step
    saves: tuple[Save, ...] = ()  # of its files
    gone: tuple[int, ...] = ()  # nodes that had some of its files on their local disks, and were gone
    elsewhere: bool = False  # in another folder than those that resumes loaded
    upon: str = ""  # the damaged checkpoint on which it may build

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(save.path for save in self.saves)


@dataclass(frozen=True)
class Resume:
    """A start of training after earlier steps: a new attempt, or an attempt that loaded a checkpoint again."""

    attempt: Segment  # the steps from this resume on
    reached: int  # the highest global step before it
    best: SavedCheckpoint | None  # the newest checkpoint at that time that is sure to be complete
    newer: SavedCheckpoint | None  # a still newer checkpoint that may be complete


def resumes(run: Record) -> list[Resume]:
    """The resumes of a run in order of attempts, including resumes whose base is unknown."""
    history, kept, damaged = run.history, _kept(run), [damage for damage in damages(run) if damage.contents]
    found, deltas = [], Deltas.of(run) if damaged else Deltas()
    hits = list(run.of_kind(Kind.APPLYING, Kind.APPLIED))
    for part in history.segments:
        this = (part.number, part.after)
        own_s, earlier = history.of_segment(*this).first_s(), history.before_segment(*this)
        if own_s is None or not len(earlier) or part.in_memory or _is_warm_up(history, part):
            continue
        if (after_warm_up := _in_step(history, part)) is not None:
            part = after_warm_up
        loads = [load.mono_s for load in history.loads if load.attempt == part.number and load.mono_s <= own_s]
        by_s = part.started_s if part.after else min(loads, default=part.started_s)
        # If the attempt loads a checkpoint between two steps, checkpoints that it saved after the fault may contain the
        # damage that the fault did.
        whole_s = max((hit.mono_s for hit in hits if hit.mono_s <= by_s), default=by_s) if part.after else by_s
        earlier_saves = (
            _within_reach(run, whole, part)
            for saved in kept
            if saved.attempt < part.number + (part.after > 0) and saved.whole_s <= whole_s
            if (whole := _not_hit([one for one in damaged if one.at_s <= by_s], saved, deltas))
        )
        there = [saved for saved in earlier_saves if saved]
        sure = [saved for saved in there if saved.sure or saved.step == part.base]  # a load proves it too
        best = max(sure, key=lambda saved: saved.step, default=None)
        newer = [saved for saved in there if saved not in sure and (best is None or saved.step > best.step)]
        found.append(
            Resume(
                part,
                max(0, int(earlier.global_step.max())),
                best,
                max(newer, key=lambda saved: saved.step, default=None),
            )
        )
    return found


def _is_warm_up(history: History, part: Segment) -> bool:
    """Whether these steps were a warm-up: the attempt made them from scratch, and then loaded a checkpoint of the last
    of them or of a later step, which replaced all that they did; or it died before that load."""
    steps = history.of_segment(part.number, part.after)
    last_s, done = steps.last_s(), int(steps.global_step.max(initial=0))
    if part.base == 0 and not part.after and _ended_in_warm_up(history, part.number):
        return True
    later = [other for other in history.segments if other.number == part.number and other.after > part.after]
    loads = [load for load in history.loads if load.attempt == part.number and load.mono_s > (last_s or 0.0)]
    saves = [saved_as(load.path, history.saves, part.started_s) for load in loads if load.ok]
    to = later[0].base if later else max((save.global_step or 0 for save in saves if save), default=0)
    return part.base == 0 and (to or 0) >= done


def _ended_in_warm_up(history: History, attempt: int) -> bool:
    """Whether the attempt died in its warm-up, before its load or before a step that would show the load: it loaded
    nothing before its last step, and made no more steps than another attempt made before its first load."""
    done, first = int(history.executions.of_attempt(attempt).local_step.max(initial=0)), dict[int, int]()
    for load in _of_training(history):
        first[load.attempt] = min(load.local_step, first.get(load.attempt, load.local_step))
    return first.pop(attempt, done) >= done and done <= max(first.values(), default=0)


def _of_training(history: History) -> list[Load]:
    """The loads of ranks that make steps."""
    ranks = set(history.executions.rank.tolist())
    return [load for load in history.loads if load.rank in ranks]


def _in_step(history: History, part: Segment) -> Segment | None:
    """If a part began from scratch and then loaded the checkpoint of exactly the step that its count had reached: the
    part, as if it had resumed there after a warm-up. Such a load does not show in the numbers of the steps. Otherwise
    None."""
    for load in history.loads:
        if part.base == 0 and load.ok and load.attempt == part.number and load.local_step > part.after:
            save = saved_as(load.path, history.saves, part.started_s)
            if save and save.global_step == load.local_step:
                return replace(part, base=save.global_step, loaded=load.path)
    return None


def is_of_other_replicas(attempt: Attempt) -> bool:
    """Whether these are the steps of other replicas than before (`as_one_job`), and no attempt of a torchrun."""
    return attempt.base is None and not attempt.ranks and attempt.world_size > 0


def resumed_in_words(history: History, step: Execution) -> str:
    """Where the job resumed before it made a step, as a phrase for sentences about the step's differences."""
    own = [part for part in history.segments if part.number == step.attempt and part.after <= step.segment]
    if len(own) > 1 and own[-1].base is not None:
        return f"after the job went back to step {own[-1].base}"
    resumed = history.attempt(step.attempt)
    earlier = (history.executions.attempt < step.attempt).any()
    if resumed is not None and earlier and is_of_other_replicas(resumed):
        return "after other replicas had begun to make the steps"
    if resumed is None or resumed.base is None or not earlier:
        return "without any restart before it"
    return f"after the resume from step {resumed.base}"


def name_of(path: str) -> str:
    """The name of the checkpoint to which the file at `path` belongs."""
    return posixpath.basename(checkpoint_of(path))


def _kept(run: Record) -> list[SavedCheckpoint]:
    points, root = points_of(run), root_of(run)
    saves = [save for save in run.history.saves if save.global_step is not None]
    apart = _of_kind(run, points.saved_elsewhere(saves), points)
    # A model exported to another folder is no checkpoint, unless attempts went on from there.
    saves = [save for save in saves if is_below(save.path, root) or (points.kinds and points.has(save.path))]
    own = [saved for group in points.by_kind(saves) for saved in _of_kind(run, group, points)]
    return [*own, *(replace(saved, sure=False, elsewhere=True) for saved in apart)]


def _of_kind(run: Record, saves: Sequence[Save], points: Points) -> list[SavedCheckpoint]:
    groups: dict[tuple[int, int], list[Save]] = {}
    for save in saves:
        groups.setdefault((save.attempt, save.global_step or 0), []).append(save)
    sizes = {attempt.number: attempt.world_size for attempt in run.history.attempts}
    of_size: dict[int, list[Sequence[Save]]] = {}
    for (attempt, _step), group in groups.items():
        of_size.setdefault(sizes[attempt], []).append(group)
    usual = {size: _usual(of_this) for size, of_this in of_size.items()}
    ends = run.history.executions.last_of("attempt", "rank")  # by time
    trained = {(done.attempt, done.rank): done for done in ends}
    begun = {save.attempt: save.begun_s for save in sorted(run.history.saves, key=lambda save: save.begun_s)}
    kept = []
    for (attempt, step), group in groups.items():
        files, ranks = usual[sizes[attempt]]
        lacks = files - _files(group)
        whole = all(save.ok or _was_loaded(save, run.history) for save in group)
        if whole and (not lacks or ranks <= _ranks(group)):
            last = [trained.get((attempt, rank)) for rank in _ranks(group)]
            found = _one(step, group, last, begun[attempt], lacks)
            if not (found.went_on and any(points.loads(name) for name in lacks)):
                kept.append(found)  # otherwise the job did not mean to write all files that a resume loads
    return kept


def _was_loaded(save: Save, history: History) -> bool:
    """Whether the next attempt loaded this file before anything was saved there again. Such a load proves that the save
    was complete, even if a rank was killed before it could report the end of its part. If that attempt began at another
    step, it loaded an older file of this name, which the save had not replaced yet."""
    back = history.attempt(save.attempt + 1)
    if back is not None and back.base not in (None, save.global_step):
        return False
    loads = [load for load in history.loads if load.ok and load.path == save.path and load.attempt == save.attempt + 1]
    first_s = min((load.mono_s for load in loads), default=0.0)
    again = any(other.path == save.path and save.begun_s < other.begun_s < first_s for other in history.saves)
    return bool(loads) and not again


def _usual(groups: Sequence[Sequence[Save]]) -> tuple[Counter[str], set[int]]:
    """The set of files that checkpoints have most often, and the ranks that write it. If two sets are equally frequent,
    the larger set."""
    often = Counter(frozenset(_files(group).items()) for group in groups)
    most = max(often.items(), key=lambda pair: (pair[1], sum(times for _file, times in pair[0])))
    files = Counter(dict(most[0]))
    return files, set().union(*(_ranks(group) for group in groups if _files(group) == files))


def _ranks(group: Iterable[Save]) -> set[int]:
    return {rank for save in group for rank in save.ranks}


def _files(group: Iterable[Save]) -> Counter[str]:
    """The names of a checkpoint's files, with numbers replaced by `#`. Each name is counted once for each rank that
    wrote the file."""
    return Counter(_NUMBER.sub("#", posixpath.basename(save.path)) for save in group for _rank in save.ranks)


def _one(
    step: int, group: Sequence[Save], trained: Sequence[Execution | None], begun_s: float, lacks: Collection[str]
) -> SavedCheckpoint:
    """The checkpoint of one step. `trained`: the last step of each rank that wrote it. `begun_s`: when the last save of
    the attempt began. `lacks`: files that most other checkpoints have."""
    whole_s, first = max(save.ended_s or save.begun_s for save in group), group[0]
    in_thread = any(
        save.by_child or (save.ended_s or save.begun_s) - save.begun_s > 2 * save.blocked_s + 0.01 for save in group
    )
    went_on = all(last and last.mono_s > whole_s and last.local_step > first.local_step for last in trained)
    left = all(save.children_ended for save in group)
    done = all(save.ok for save in group) and (begun_s > whole_s or left or (not in_thread and went_on))
    path = first.path if len(group) == 1 else _common(group)
    late, sure = any(save.in_thread for save in group), done and not lacks
    return SavedCheckpoint(step, path, first.attempt, whole_s, sure, tuple(lacks), done, late, tuple(group))


def _common(group: Sequence[Save]) -> str:
    """The path that names a checkpoint of several files: the folder or file with its step in the name, or else the
    folder of all files."""
    main = min((save.path for save in group), key=main_first)
    kept = checkpoint_of(main)
    return kept if number_in_name(posixpath.basename(kept)) is not None else posixpath.dirname(main)


def _within_reach(run: Record, saved: SavedCheckpoint, part: Segment) -> SavedCheckpoint | None:
    """The checkpoint as the attempt could reach it. Without some of its files, it may still be complete: another node
    may have copies. None if all its files were gone."""
    if part.loaded in saved.paths:
        return saved
    lost = out_of_reach(run, saved.saves, part.number, part.started_s)
    if lost.paths and lost.paths == saved.paths:
        return None
    return replace(saved, sure=False, gone=lost.nodes) if lost.paths else saved


def _not_hit(damaged: Sequence[Damage], saved: SavedCheckpoint, deltas: Deltas) -> SavedCheckpoint | None:
    """The checkpoint; None if a fault has damaged it or a checkpoint on which it builds. If this is not known, the
    returned checkpoint is not sure."""
    if any(damage.step == saved.step for damage in damaged):
        return None
    earlier = [damage.checkpoint for damage in damaged if (damage.step or 0) < saved.step]
    builds = {one: deltas.builds(saved.path, saved.attempt, one) for one in earlier}
    if True in builds.values():
        return None
    unknown = next((one for one, known in builds.items() if known is None), None)
    return replace(saved, sure=False, upon=posixpath.basename(unknown)) if unknown else saved


@dataclass(frozen=True)
class Apart:
    """Ranks that loaded a checkpoint of another step than the one that the job continued from."""

    ranks: tuple[int, ...]
    step: int  # global: the step of their checkpoint
    rests_on: str
    sure: bool  # their optimizer's counter agrees with the checkpoint, too


_NUMBERS = re.compile(r"\d+")


def apart(part: Segment) -> Apart | None:
    """The ranks that resumed from another step than the rest. If there are several such groups of ranks: the first
    whose step is certain, or else the first. None if all ranks resumed from the same step, as far as was seen."""
    if part.base is None:
        return None
    found = [
        _of(record, part.base, part.witnesses)
        for record in part.witnesses
        if record.name == RECORD
        and part.base not in record.fits
        and (record.value is not None or len(record.fits) == 2)  # two: of a rank that makes no steps
    ]
    told = [candidate for candidate in found if candidate is not None]
    return max(told, key=lambda candidate: candidate.sure, default=None) or _by_state(part)


def ranks_apart_in_words(part: Segment) -> str:
    """A clause about ranks that certainly resumed from another step than the rest. Empty if there are none."""
    other = apart(part)
    if other is None or not other.sure:
        return ""
    return said("steps apart", ranks=", ".join(map(str, other.ranks)), step=other.step, base=part.base)


def files_of_others(history: History, attempt: int, base: int) -> str:
    """Clauses about ranks that loaded the file of another rank instead of their own; the two names differ only in
    numbers. Empty if there are none. `base`: the step after which the files were saved."""
    writer = {save.path: save.ranks[0] for save in history.saves if save.global_step == base and len(save.ranks) == 1}
    clauses = []
    for rank in sorted({*writer.values()}):
        read = [load.path for load in history.loads if load.ok and (load.attempt, load.rank) == (attempt, rank)]
        own = {_NUMBERS.sub("#", path): path for path, by in writer.items() if by == rank and path not in read}
        for path in dict.fromkeys(read):
            if writer.get(path, rank) != rank and (mine := own.get(_NUMBERS.sub("#", path))):
                clauses.append(
                    f"rank {rank} loaded {posixpath.basename(path)}, which rank {writer[path]} had saved, and not "
                    f"{posixpath.basename(mine)}, which it had saved itself"
                )
    more = f"; and {len(clauses) - 2} more" if len(clauses) > 2 else ""
    return "; ".join(clauses[:2]) + more


def _by_state(part: Segment) -> Apart | None:
    """The ranks whose optimizer's counter and samples both go on from another step than those of the other ranks,
    whatever file they loaded: the contents of a file may be older than its name says."""
    alone = [one for one in part.witnesses if one.ranks and len(one.fits) == 1 and part.base not in one.fits]
    counters = {(one.ranks, one.fits) for one in alone if one.name == OPTIMIZER}
    rest = {
        rank
        for one in part.witnesses
        if one.name == OPTIMIZER and len(one.fits) == 1 and part.base in one.fits
        for rank in one.ranks
    }
    samples = (
        one
        for one in alone
        if one.name == SAMPLES and (one.ranks, one.fits) in counters and rest and rest.isdisjoint(one.ranks)
    )
    return next((Apart(one.ranks, one.fits[0], f"of its samples, {one.rests_on}", True) for one in samples), None)


def _of(record: Witness, base: int, witnesses: tuple[Witness, ...]) -> Apart | None:
    """The ranks that loaded a checkpoint of another step. None if the counters of all these ranks show that they got
    the state of the other ranks."""
    counters = {rank: witness for witness in witnesses if witness.name == OPTIMIZER for rank in witness.ranks}
    behind = [rank for rank in record.ranks if rank in counters and set(record.fits) & set(counters[rank].fits)]
    sure = tuple(rank for rank in behind if base not in counters[rank].fits)
    ranks = sure or tuple(rank for rank in record.ranks if rank not in counters)
    return Apart(ranks, record.fits[0], record.rests_on, bool(sure)) if ranks else None
