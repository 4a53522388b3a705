"""Decides which saved files belong to a checkpoint from which the job resumes, and which do not, such as `best.pt`; and
finds the twin's counterpart of each checkpoint.

The resumes of a run show it. A *family* is all files whose paths differ only in numbers: `step-5` and `step-10`, or
`ema-step-5.pt` and `ema-step-10.pt`; `best.pt` is a family by itself. The job resumes from a family if an attempt
loaded a file of it before its first step. The job could also resume from a family whose checkpoints hold at least the
same entries (tensors and values); and from files that hold, by their contents, all parameters and moments that the job
had when it saved them, such as an emergency save. If no load was seen, every saved file counts, except copies such as
`best.pt` beside others."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile

from torchaos.harness.analysis.checkpointing.checkpoint_contents import (
    Checkpoint,
    checkpoints_of,
    is_below,
    local_folder,
    root_of,
)
from torchaos.harness.protocol.check_sums import MODULUS, is_whole
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import checkpoint_of, final_path, is_copy
from torchaos.harness.record.history import History, Save
from torchaos.harness.record.history.saves_and_loads import saved_as
from torchaos.harness.record.history.snapshots import states
from torchaos.harness.record.record import Record

_NUMBER = re.compile(r"\d+")
Pair = tuple[Checkpoint, Checkpoint]


def family(path: str) -> str:
    """The final path with each number replaced by `#`."""
    return _NUMBER.sub("#", final_path(path))


def pairs(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """Pairs of a good checkpoint and its counterpart in the twin, of the same step, in the order of `ours`. The two
    have the same path, or different paths and mostly the same entries: names may be random, a trainer may choose
    another name if its usual name exists already, or it writes two files in turn, and after a restart the files change
    places. Checkpoints with several possible counterparts are left out (see `unclear`)."""
    return [(checkpoint, others[0]) for checkpoint, others in _matches(ours, theirs) if len(others) == 1]


def unclear(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The good checkpoints with several possible counterparts in the twin."""
    return [checkpoint for checkpoint, others in _matches(ours, theirs) if len(others) > 1]


def _matches(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[tuple[Checkpoint, list[Checkpoint]]]:
    """The good checkpoints of `ours`, each with its possible counterparts in the twin. If one of these has equal
    contents, it is the counterpart, and the others belong to other checkpoints of this attempt."""
    found, taken = [], defaultdict[tuple[int | None, int | None], set[str]](set)
    for checkpoint in (checkpoint for checkpoint in ours if checkpoint.good):
        good = [other for other in theirs if other.good]
        same = [other for other in good if other.step == checkpoint.step]
        exact = [other for other in same if other.path == checkpoint.path]
        # The step of a save is the last that any rank had made. For a rank that makes no steps, this number is chance.
        if not exact and _size(checkpoint):  # of a file that is not read, nothing is known to be equal
            exact = [other for other in good if other.path == checkpoint.path and _are_equal(other, checkpoint)]
        found.append((checkpoint, exact or _most_alike(checkpoint, _elsewhere(checkpoint, same, ours, theirs))))
    for place, (checkpoint, others) in enumerate(found):
        own = taken[checkpoint.step, checkpoint.attempt]
        equal = [other for other in others if other.path not in own and _are_equal(other, checkpoint)]
        if len(others) > 1 and equal:
            found[place] = checkpoint, equal[:1]
        own.update(other.path for other in found[place][1] if len(found[place][1]) == 1)
    for place, (checkpoint, others) in enumerate(found):
        own = taken[checkpoint.step, checkpoint.attempt]
        free = [other for other in others if other.path not in own]
        if len(others) > 1 and len(free) == 1:
            found[place] = checkpoint, free
    return found


def _most_alike(checkpoint: Checkpoint, others: list[Checkpoint]) -> list[Checkpoint]:
    """Those of `others` that are most like `checkpoint`: in the part of their paths below the first difference, in the
    ranks that saved them, in the words of their paths, and in the names of their entries."""
    own = checkpoint.path
    likenesses: tuple[Callable[[Checkpoint], int], ...] = (
        lambda other: _equal_at_end(own.split("/"), other.path.split("/")),
        lambda other: int(bool(checkpoint.ranks) and checkpoint.ranks == other.ranks),
        lambda other: sum(a == b for a, b in zip(_words(own), _words(other.path), strict=False)),
        lambda other: 2 * _shared(checkpoint, other) - _size(other),
    )
    for alike in likenesses:
        most = max(map(alike, others), default=0)
        others = [other for other in others if alike(other) == most]
    return others


def _equal_at_end(ours: Sequence[str], theirs: Sequence[str]) -> int:
    both = zip(reversed(ours), reversed(theirs), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _words(path: str) -> list[str]:
    return re.split(r"[^A-Za-z0-9]+", path)[::-1]


def _are_equal(one: Checkpoint, other: Checkpoint) -> bool:
    return (one.tensors, one.values) == (other.tensors, other.values)


def _elsewhere(
    checkpoint: Checkpoint, same: Sequence[Checkpoint], ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]
) -> list[Checkpoint]:
    """Checkpoints of `same`, all of the same step as `checkpoint`, that may be its counterpart under another path.
    Either both paths are new to the other side, or both sides have both paths, with other steps; or a later attempt has
    a folder of its own."""
    if checkpoint.step is None:
        return []
    own = {each.path: each for each in ours}
    here = checkpoint.path in {other.path for other in theirs}
    free = [
        other for other in same
        if not _has(own, other) and (
            (other.path in own) is here or (not here and _goes_on(checkpoint, own[other.path], other.step))
        )
    ]  # fmt: skip
    return [other for other in free if 2 * _shared(checkpoint, other) > max(_size(checkpoint), _size(other))]


def _has(own: Mapping[str, Checkpoint], other: Checkpoint) -> bool:
    return other.path in own and own[other.path].step == other.step


def lacking(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The good checkpoints of the twin that the run lacks. Left out are those that the job may have deleted because it
    keeps only the newest: the run has at least as many checkpoints of the same family with later steps as the twin has
    checkpoints of this family."""
    own = {checkpoint.path: checkpoint for checkpoint in ours}
    paired = {other.path for _one, others in _matches(ours, theirs) for other in others}
    gone = [other for other in theirs if other.good and other.path not in paired and not _there(own.get(other.path))]
    return [other for other in gone if not _removed(other, ours, theirs)]


def moved(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Pair]:
    """Pairs of good checkpoints that have the same path and different steps, and no counterpart under another path."""
    there = {other.path: other for other in theirs if other.good}
    paired = {checkpoint.path for checkpoint, others in _matches(ours, theirs) if others}
    return [
        (checkpoint, there[checkpoint.path])
        for checkpoint in ours
        if checkpoint.good and checkpoint.path in there and checkpoint.path not in paired
        if there[checkpoint.path].step != checkpoint.step
        if not any(_goes_on(one, checkpoint, there[checkpoint.path].step) for one in ours)
    ]


def _goes_on(one: Checkpoint, before: Checkpoint, step: int | None) -> bool:
    """Whether a checkpoint of this step is what a later attempt made of the one `before`, by the same ranks, in another
    folder: a job may have a folder for each of its starts."""
    later = one.attempt is not None and before.attempt is not None and one.attempt > before.attempt
    alike = family(one.path) == family(before.path) and one.ranks == before.ranks
    return one.good and later and alike and one.step == step


def _there(checkpoint: Checkpoint | None) -> bool:
    """Whether the run has, or had, this checkpoint of the twin: its own is good, or newer checkpoints of its family may
    have replaced it."""
    return checkpoint is not None and (checkpoint.good or "#" in family(checkpoint.path))


def _removed(other: Checkpoint, ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> bool:
    if other.step is None:
        return False
    kept = _steps(other, theirs)
    return len({step for step in _steps(other, ours) if step > other.step}) >= len(kept)


def _steps(like: Checkpoint, found: Sequence[Checkpoint]) -> set[int]:
    kin = family(like.path)
    return {
        checkpoint.step
        for checkpoint in found
        if checkpoint.good and checkpoint.step is not None and family(checkpoint.path) == kin
    }


def _size(checkpoint: Checkpoint) -> int:
    return len(checkpoint.tensors) + len(checkpoint.values)


def _shared(checkpoint: Checkpoint, other: Checkpoint) -> int:
    return len(checkpoint.tensors.keys() & other.tensors.keys()) + len(checkpoint.values.keys() & other.values.keys())


def without_unreadable(
    ours: Sequence[Checkpoint], twins: Sequence[Sequence[Checkpoint]]
) -> tuple[list[Checkpoint], list[list[Checkpoint]], list[str], list[str]]:
    """The checkpoints of the run and of the twins, without those that can't be read for the same reason in the run and
    in every twin: a fault is not the reason then. Also the paths that were left out, and the paths of checkpoints of
    which a part was read; of these, only the problem is left out. Known damage is never left out."""
    same = {one.path for one in ours if twins and _obstacle(one) and all(_reads_alike(theirs, one) for theirs in twins)}
    nothing = [one.path for one in ours if one.path in same and not (one.tensors or one.values)]
    kept = [[_cleared(one, same) for one in each if one.path not in nothing] for each in (ours, *twins)]
    return kept[0], kept[1:], nothing, sorted(same - {*nothing})


def _reads_alike(theirs: Sequence[Checkpoint], one: Checkpoint) -> bool:
    return any(other.path == one.path and _obstacle(other) == _obstacle(one) for other in theirs)


def _obstacle(checkpoint: Checkpoint) -> str:
    """Why the checkpoint can't be read, without the numbers in the text. Empty if it can be read, or is certainly
    damaged."""
    return _NUMBER.sub("#", checkpoint.obstacle)


def _cleared(checkpoint: Checkpoint, same: set[str]) -> Checkpoint:
    return replace(checkpoint, loadable=True, problem=None) if checkpoint.path in same else checkpoint


@dataclass(frozen=True)
class Points:
    """The files that the job resumes from.

    `kinds`: kinds of checkpoints, each a set of families. If it is empty, every saved file counts as a checkpoint that
    the job resumes from. `parts`: families of the names of the files that resumes loaded. `elsewhere`: families of the
    same names in other folders, which no resume loaded."""

    kinds: tuple[frozenset[str], ...]
    parts: frozenset[str]
    elsewhere: frozenset[str] = frozenset()

    def has(self, path: str) -> bool:
        return not self.kinds or any(_family(path) in kind for kind in self.kinds)

    def by_kind(self, saves: Sequence[Save]) -> list[list[Save]]:
        """The saves of each kind of checkpoint. Saves of other files are left out."""
        if not self.kinds:
            return [[save for save in saves if not is_copy(save.path)] or list(saves)]
        return [[save for save in saves if _family(save.path) in kind] for kind in self.kinds]

    def saved_elsewhere(self, saves: Iterable[Save]) -> list[Save]:
        return [save for save in saves if _family(save.path) in self.elsewhere]

    def loads(self, name: str) -> bool:
        """Whether a resume loaded a file of this name; numbers in the name are ignored."""
        return family(name) in self.parts


def points_of(run: Record) -> Points:
    """Finds the files from which the job resumes. Three places are looked at separately, because a node may be lost
    with its disk or memory: the nodes' own disks, folders outside that of the checkpoints from which attempts went on
    (such as /dev/shm), and all others. A job that resumed from one of them could also resume from the others."""
    root, local = root_of(run), local_folder(run)
    saved = {save.path for save in run.history.saves}
    outside = {path for path in saved if not is_below(path, root)}
    used = {family(posixpath.dirname(attempt.loaded)) for attempt in run.history.attempts if attempt.loaded}
    outside_used = {path for path in outside if family(posixpath.dirname(path)) in used}
    own = {path for path in saved - outside if local and is_below(path, local)}
    tiers = [{_family(path) for path in paths} for paths in (own, outside_used, saved - outside - own) if paths]
    found = [_points(run, tier) for tier in tiers]
    kinds = [each.kinds or _numbered(tier) for each, tier in zip(found, tiers, strict=True)]
    known = any(each.kinds for each in found)
    usable = frozenset(chain(*chain(*kinds))) if known else frozenset[str]()
    names = {_name(each) for each in usable}
    others = {_family(save.path) for save in run.history.saves} - usable
    return Points(
        tuple(chain(*kinds)) if known else (), frozenset(chain(*(each.parts for each in found))),
        frozenset(each for each in others if _name(each) in names and not is_copy(posixpath.dirname(each))),
    )  # fmt: skip


def _name(of_family: str) -> str:
    """The name of the checkpoints of a family, below the folder that holds them all."""
    folder = posixpath.dirname(of_family.partition("#")[0])
    return of_family[len(folder) :]


def _numbered(families: Iterable[str]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset((name,)) for name in sorted(families) if "#" in name)


def _points(run: Record, saved: set[str]) -> Points:
    """The files of some families that the job resumes from."""
    root = root_of(run)
    read = set(_loaded(run.history))
    paths = {path for path in read if _family(path) in saved}
    loaded = _of_one_save(run, {_family(path) for path in paths})
    folders = {posixpath.dirname(path) for path in paths}
    if all(map(is_copy, loaded)) and any(posixpath.dirname(path) in folders for path in read - paths):
        loaded = set()  # a file was loaded as well whose save was not seen
    held = _held(run, root)
    least: set[str] = set().union(*(held.get(name, set()) for name in loaded))
    alike = sorted(name for name in saved - loaded if least and held.get(name, set()) >= least)
    whole = _with_all_state(run, {name for name in saved - loaded if not is_copy(name)}) if loaded else []
    kinds = (frozenset(loaded), *(frozenset((name,)) for name in alike), *whole) if loaded else ()
    parts = (path for path in paths if _family(path) in loaded)
    return Points(kinds, frozenset(family(posixpath.basename(path)) for path in parts))


def _with_all_state(run: Record, families: set[str]) -> list[frozenset[str]]:
    """Of these families, those whose files together hold all parameters and moments that the job had when it saved
    them, bit for bit; for each folder and step."""
    due: dict[tuple[int, int], set[int]] = {}
    for state in states(run.of_kind(Kind.KEPT)):
        sums = [text for what in ("parameters", "moments") for _kind, text in state.sums.get(what, {}).values()]
        if state.sums.get("moments") and all(map(is_whole, sums)):
            due[state.event.attempt or 0, state.event.step or 0] = {int(text, 16) for text in sums}
    saves = [save for save in run.history.saves if save.ok and _family(save.path) in families]
    found: dict[tuple[str, int, int], tuple[set[str], set[int]]] = defaultdict(lambda: (set(), set()))
    for checkpoint in checkpoints_of(run) or ():
        save = saved_as(posixpath.join(root_of(run), checkpoint.path), saves) if checkpoint.good else None
        if save is not None and save.global_step == checkpoint.step:
            names, sums_of = found[posixpath.dirname(save.path), save.attempt, save.local_step]
            names.add(_family(save.path))
            sums_of |= {int(sketch[0]) % MODULUS for sketch in checkpoint.sketches.values() if sketch}
    return [
        frozenset(names) for (_folder, attempt, step), (names, held) in found.items()
        if (attempt, step) in due and due[attempt, step] <= held
    ]  # fmt: skip


def _of_one_save(run: Record, loaded: set[str]) -> set[str]:
    """Of the families that resumes loaded, those that one save writes: the families from which attempts went on, and
    all families that were saved at the same steps. One step may be missing, because a death may cut a save short. The
    other families hold a detail, such as the best metric. If it is not known from which files attempts went on: the
    families with a number or, if none has one, all families that are no copies."""
    plain = {name for name in loaded if not is_copy(name)} or loaded
    main = {_family(attempt.loaded) for attempt in run.history.attempts if attempt.loaded} & plain
    if not main:
        return {name for name in plain if "#" in posixpath.basename(name)} or plain
    at: dict[str, set[int | None]] = defaultdict(set)
    for save in run.history.saves:
        at[_family(save.path)].add(save.global_step)
    due = set().union(*(at[name] for name in main))
    return {name for name in loaded if name in main or len(due - at[name]) <= 1}


def are_copies(run: Record, path: str, other: str) -> bool:
    """Whether the families of two files are copies of each other: at some step both held the same tensors, bit for bit.

    Files of the same family are no copies but parts of one checkpoint: their names differ in the rank, for example."""
    families = {_family(path), _family(other)}
    found: dict[int | None, dict[str, Mapping[str, str]]] = defaultdict(dict)
    for checkpoint in checkpoints_of(run) or []:
        name = _family(posixpath.join(root_of(run), checkpoint.path))
        if name in families and checkpoint.good and checkpoint.tensors:
            found[checkpoint.step][name] = checkpoint.tensors
    tensors = [tuple(held.values()) for held in found.values() if len(held) == 2]
    return any(ours == theirs for ours, theirs in tensors)


def _loaded(history: History) -> Iterable[str]:
    """The paths that attempts loaded, or tried to load, before their first step."""
    first = {attempt.number: history.executions.of_attempt(attempt.number).first_s() for attempt in history.attempts}
    return (load.path for load in history.loads if load.mono_s <= (first.get(load.attempt) or float("inf")))


def are_alternatives(run: Record, path: str, other: str) -> bool:
    """Whether two files are of different families whose checkpoints hold the same entries, so that a job can resume
    from either."""
    held, families = _held(run, root_of(run)), {_family(path), _family(other)}
    names = [held.get(name, set()) for name in families]
    return len(families) == 2 and bool(names[0]) and names[0] == names[1]


def _held(run: Record, root: str) -> dict[str, set[str]]:
    """The names of all entries of each family, without the names of their files. `later` in an inventory: checkpoints
    that were changed after the judged part of the run, and so are not judged."""
    found: dict[str, set[str]] = {}
    inventory = run.artifacts.get("inventory") or {}
    entries = [(each.path, each.tensors, each.values) for each in checkpoints_of(run) or []]
    entries += [(each["path"], each["tensors"], each["values"]) for each in inventory.get("later", ())]
    for path, tensors, values in entries:
        names = {name.rpartition(":")[2] for name in (*tensors, *values)}
        found.setdefault(_family(posixpath.join(root, path)), set()).update(names)
    return found


def _family(path: str) -> str:
    """The family of the checkpoint to which a file belongs, without the file extension, because a save may get its
    extension only with its final name."""
    return posixpath.splitext(family(checkpoint_of(path)))[0]
