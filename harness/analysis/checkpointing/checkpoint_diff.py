"""Compares the checkpoints of a run with those of its twins, entry by entry, and finds those that are missing.

An entry is a tensor or a value. Its allowed difference from the twin's is the tolerance of the scenario, or rounding,
or LEARNED_FACTOR times the largest difference of this entry between any two twins. So if the last bit differs between
twins, another last bit is allowed, but not a lost buffer. A somewhat larger difference is doubtful: it may be chance,
or rounding in low precision. Any other difference is a clash.

Some values are no part of the training state: the time of the save, and the number of restarts. A restart changes such
values in a healthy job; in a twin they never change. A value that the job lost can differ by as little, for example a
counter of bad evaluations that starts again at 0. Only the name and the content distinguish such a value from
bookkeeping, so both must match."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from statistics import median

from torchaos.harness.analysis.checkpointing.checkpoint_contents import (
    Checkpoint,
    Clash,
    checkpoints_of,
    differing,
    is_below,
    root_of,
)
from torchaos.harness.analysis.checkpointing.resume_points import Pair, family, lacking, moved, pairs, points_of
from torchaos.harness.analysis.tolerance import CAP, CERTAIN, LEARNED_FACTOR, LOW_PRECISION, rounding
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.record.history import History
from torchaos.harness.record.record import Record


def claimed_whole(run: Record, ours: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Damaged checkpoints whose save failed, and which the job then renamed to the usual name of a complete checkpoint.
    A checkpoint that had its final name from the start is not reported: the job may write a further file last to show
    that it is complete. A checkpoint whose save succeeded is not reported either: it may have been damaged later."""
    named = {posixpath.normpath(str(event.data["to"])) for event in run.of_kind(Kind.RENAMED)}
    failed, went_well = ({save.path for save in run.history.saves if save.ok is ok} for ok in (False, True))
    suspects, whole = (named & failed) - went_well, {family(checkpoint.path) for checkpoint in ours if checkpoint.good}
    return [
        checkpoint
        for checkpoint in ours
        if not checkpoint.good and family(checkpoint.path) in whole
        if posixpath.join(root_of(run), checkpoint.path) in suspects
    ]


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
    """Whether the job never resumes from this checkpoint, and keeps it for another purpose, such as `best.pt`. A metric
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


_CLOCK = re.compile(r"time|date|clock|elapsed|duration|second|uuid|host", re.I)
_RESTART = r"(?:restart|resum|incarnation|relaunch|respawn|lineage)[a-z]*"
_COUNT = re.compile(
    rf"(?:^|[._:])(?:n_?|num_?|is_?|was_?)?(?:{_RESTART}|attempts?|launch(?:es)?)(?:_?(?:count|from|path|step))?$", re.I
)
_SOURCE = re.compile(r"(?:^|[._:])_?name_or_path$")  # where a library of Hugging Face loaded a model from
_NUMBERS = re.compile(r"\d+")
_LIST = re.compile(rf"(?:^|[._:]){_RESTART}\.\d+(?:\.|$)", re.I)


def may_be_a_clock(clash: Clash) -> bool:
    """Whether the differing value may be a time. Then its name is that of a time, or both values are seconds,
    milliseconds or nanoseconds since 1970 for a date from 2001 to 2096."""
    return clash.kind == "value" and bool(_CLOCK.search(clash.name) or all(map(_is_date, (clash.ours, clash.theirs))))


def _is_date(text: str | None) -> bool:
    try:
        number = float(text or "")
    except ValueError:
        return False
    return any(1e9 < number / unit < 4e9 for unit in (1.0, 1e3, 1e9))


def counts_restarts(clash: Clash, checkpoint: Checkpoint) -> bool:
    """Whether the differing value only shows that the job was restarted. Either it is the place from which a model was
    loaded, and this is a checkpoint of the run. Or its name is about restarts, and restarts explain the change from the
    twin's value: a number that is larger by at most the number of restarts, True instead of False, a checkpoint path
    instead of no path, or one more element of a list."""
    if clash.kind != "value" or not checkpoint.attempt or clash.ours is None:
        return False
    is_own = any(folder in clash.ours for folder in (checkpoint.root, checkpoint.named) if folder)
    if _SOURCE.search(clash.name):
        return is_own
    if clash.theirs is None:
        return _LIST.search(clash.name) is not None
    if not _COUNT.search(clash.name):
        return False
    if clash.theirs in ("0", "1"):  # some jobs count their first start
        return clash.ours.isdecimal() and 0 < int(clash.ours) - int(clash.theirs) <= checkpoint.attempt
    if clash.theirs == "False":
        return clash.ours == "True"
    return clash.theirs in ("None", "''") and is_own


_WHOLE_NUMBER = re.compile(r"-?\d+")


def first_number_apart(run: Record, twin: Record, base: int) -> Clash | None:
    """The first whole number in a checkpoint after step `base` (global) that differs from the twin's, in its checkpoint
    of the same step. Such numbers seldom follow from losses or weights. Left out are clocks, numbers of restarts, and
    numbers that differ already before the first fault, such as a process id. None if there is none, or if the contents
    of the checkpoints were not recorded."""
    ours, theirs = checkpoints_of(run) or [], checkpoints_of(twin) or []
    first_s = min((hit.mono_s for hit in run.of_kind(Kind.APPLYING, Kind.APPLIED)), default=0.0)
    made = compare(pairs(ours, theirs), [theirs], run.history, None, (), first_s)
    return next((clash for clash in made.clashes if (clash.step or 0) > base and _is_number_apart(clash)), None)


def _is_number_apart(clash: Clash) -> bool:
    numbers = all(_WHOLE_NUMBER.fullmatch(text or "") for text in (clash.ours, clash.theirs))
    return numbers and clash.kind == "value" and not may_be_a_clock(clash)


_LAST_BIT = 1e-7  # relative: the last bit of a float32
_LEAST = 1e-9  # relative: a smaller difference leaves the sketches equal
Entry = tuple[str, str]  # family of the checkpoint, name of the tensor or value


def clashes(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint], ignoring: Collection[str] = ()) -> list[Clash]:
    """All bitwise differences between good checkpoints of the same step, and the strays (see `strays`). Ordered by
    step; in each checkpoint, tensors come before values. `ignoring`: names to leave out."""
    found = [clash for pair in pairs(ours, theirs) for clash in differing(*pair)]
    return in_order(clash for clash in (*found, *strays(ours, theirs)) if clash.name not in ignoring)


def in_order(unordered: Iterator[Clash] | Sequence[Clash]) -> list[Clash]:
    return sorted(unordered, key=lambda clash: -1 if clash.step is None else clash.step)


@dataclass
class Compared:
    """The result of comparing pairs of checkpoints. All differences are relative; the dicts are keyed by entry name."""

    clashes: list[Clash] = field(default_factory=list)
    entries: set[Entry] = field(default_factory=set)  # all entries that were compared and could be judged
    learned: dict[str, float] = field(default_factory=dict)  # differences that are as large between twins
    doubtful: dict[str, float] = field(default_factory=dict)  # differences that may be chance or rounding
    rounded: float = 0.0  # the largest difference that rounding explains
    within: float = 0.0  # the largest difference that the given tolerance allows
    noisy: set[str] = field(default_factory=set)  # tensors that differ too much between twins to be judged
    unsized: set[str] = field(default_factory=set)  # other entries that differ between twins, or before any fault
    restarts: set[str] = field(default_factory=set)  # values that count restarts, and count them correctly
    ignored: set[str] = field(default_factory=set)


def compare(
    found: Sequence[Pair], twins: Sequence[Sequence[Checkpoint]], history: History, tolerance: float | None,
    ignore: Sequence[str], before_s: float = 0.0,
) -> Compared:  # fmt: skip
    """Compares pairs of checkpoints. `found`: pairs of a checkpoint of the run and the same checkpoint of the first
    twin. `twins`: the checkpoints of each twin. `history`: the history of the run. `tolerance`: relative; replaces the
    tolerance that is learned from twins and rounding. `ignore`: patterns for names of entries that are left out.
    `before_s`: the time of the first fault, CLOCK_MONOTONIC."""
    early = [pair for pair in found if pair[0].saved_s is not None and pair[0].saved_s < before_s]
    made, noise, usual = Compared(), {} if tolerance is not None else noise_of(twins, early), _usual_norms(found)
    least = _LAST_BIT if any(noise.values()) else 0.0  # the last bit may be equal in all twins by chance
    for ours, other in found:
        kin = family(other.path)  # names may be random: those of the first twin are known to all
        made.entries |= {(kin, name) for name in (*ours.tensors, *ours.values) if not _is_any(name, ignore)}
        made.ignored |= {name for name in (*ours.tensors, *ours.values) if _is_any(name, ignore)}
        for clash in differing(ours, other):
            if not _is_any(clash.name, ignore):
                theirs = _at_least(least, noise.get((kin, clash.name), 0.0))
                shrunk_by = usual.get((kin, clash.name), 0.0) / (_norm(other, clash.name) or 1.0)
                rounded = min(CAP, rounding(history, ours.step) * max(1.0, shrunk_by))
                _sort(clash, ours, theirs, rounded, tolerance, made)
    made.entries -= {entry for entry, size in noise.items() if size is None or LEARNED_FACTOR * size > CAP}
    return made


def unread_that_differ(
    found: Sequence[Pair], twins: Sequence[Sequence[Checkpoint]], ignore: Sequence[str], before_s: float
) -> tuple[str, Checkpoint] | None:
    """The first file of an unread kind whose bytes differ from the twin's file, with its checkpoint. None if there is
    none. Left out are names that match `ignore`, and files that differ already between twins or before the first fault
    (`before_s`), because they hold times or the like."""
    early = [pair for pair in found if pair[0].saved_s is not None and pair[0].saved_s < before_s]
    usual = [*early, *(pair for first, second in combinations(twins, 2) for pair in pairs(first, second))]
    noisy = {(family(other.path), name) for one, other in usual for name in _other_bytes(one, other)}
    later = (pair for pair in found if pair not in early)
    return next(
        (
            (name, one) for one, other in later for name in _other_bytes(one, other)
            if not _is_any(name, ignore) and (family(other.path), name) not in noisy
        ),
        None,
    )  # fmt: skip


def _other_bytes(ours: Checkpoint, theirs: Checkpoint) -> list[str]:
    """The names of the twin's unread files that have other bytes in the run, or are missing there. Names may hold
    numbers that differ in each run, such as times: if names are equal apart from numbers, only the number of files must
    agree. Records of earlier versions have no digests of unread files."""
    have, due = (Counter(_NUMBERS.sub("#", name) for name in one.unread) for one in (ours, theirs))
    lacks = due - have
    return [
        name for name, digest in sorted(theirs.unread.items())
        if ours.unread.get(name, digest) != digest or (name not in ours.unread and lacks[_NUMBERS.sub("#", name)])
    ]  # fmt: skip


def _usual_norms(found: Sequence[Pair]) -> Mapping[Entry, float]:
    """The median norm of each tensor over the twin's checkpoints. A single bias's moment may cross zero: there,
    rounding is a large part of its value, but a small part of its usual size."""
    norms: dict[Entry, list[float]] = {}
    for _one, other in found:
        for name in other.sketches:
            norms.setdefault((family(other.path), name), []).append(_norm(other, name))
    return {entry: median(each) for entry, each in norms.items()}


def _norm(checkpoint: Checkpoint, name: str) -> float:
    return next(iter(checkpoint.sketches.get(name, ())[1:]), 0.0)


def noise_of(twins: Sequence[Sequence[Checkpoint]], early: Sequence[Pair] = ()) -> Mapping[Entry, float | None]:
    """The largest relative difference of each entry between any two twins, for entries that differ at all. None if the
    difference has no size, or if the entry is a time.

    `early`: pairs of checkpoints of the run and a twin from before the first fault. Their values count as well. Their
    tensors do not, because a file may have been damaged later."""
    found: dict[Entry, float | None] = {}
    of_twins = (pair for first, second in combinations(twins, 2) for pair in pairs(first, second))
    seen = [(pair[0], clash) for pair in of_twins for clash in differing(*pair)]
    seen += [(pair[1], clash) for pair in early for clash in differing(*pair) if clash.kind == "value"]
    for checkpoint, clash in seen:
        entry = family(checkpoint.path), clash.name
        size = None if may_be_a_clock(clash) else clash.distance
        known = found.get(entry, 0.0)
        found[entry] = None if size is None or known is None else max(size, known)
    return found


def _at_least(least: float, noise: float | None) -> float | None:
    return None if noise is None else max(least, noise)


def _sort(
    clash: Clash, checkpoint: Checkpoint, noise: float | None, rounded: float, tolerance: float | None, made: Compared
) -> None:
    size = clash.distance
    if size is not None and tolerance and size <= tolerance:
        made.within = max(made.within, size)
    elif noise is None:
        made.unsized.add(clash.name)
    elif LEARNED_FACTOR * noise > CAP:
        (made.noisy if clash.kind == "tensor" else made.unsized).add(clash.name)
    elif size is not None and tolerance is None and rounded and size <= rounded:
        made.rounded = max(made.rounded, size, _LEAST)
    elif size is not None and noise > 0 and size <= LEARNED_FACTOR * noise:
        made.learned[clash.name] = max(size, made.learned.get(clash.name, 0.0))
    elif size is not None and tolerance is None and 0 < size <= max(CERTAIN * noise, LOW_PRECISION if rounded else 0.0):
        made.doubtful[clash.name] = max(size, made.doubtful.get(clash.name, 0.0))
    elif counts_restarts(clash, checkpoint):
        made.restarts.add(clash.name)
    else:
        made.clashes.append(clash)


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name of an entry matches a pattern, with or without the name of its file before the colon."""
    return any(fnmatchcase(candidate, pattern) for pattern in patterns for candidate in (name, name.partition(":")[2]))
