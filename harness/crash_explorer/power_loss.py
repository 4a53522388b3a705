"""All machines of the job lose their power at once: bytes that were not synced may be missing, torn, or present. There
are three models of what a disk keeps; each is a promise that file systems make.

- `strict`: only what was synced is there. The bytes of a file need fsync(2) of the file, its name needs fsync(2) of its
  folder. All else may be there or not, in any order. Source: POSIX.1-2024, fsync(); and fsync(2) of Linux: "Calling
  fsync() does not necessarily ensure that the entry in the directory containing the file has also reached disk. For
  that an explicit fsync() on a file descriptor for the directory is also needed."
- `ext4-ordered`: ext4 on one machine as it is mounted by default. Changes of names and truncations are in a journal and
  are kept in order: if a change is lost, all later changes are lost too. An fsync that has something to commit commits
  all earlier changes, of all processes. Bytes that were not synced may be missing from the end of a file, in blocks of
  4096. If a file of at most 1 MiB is renamed onto another (or truncated, written again and closed), its bytes are on
  disk before the rename is. The kernel begins to write a larger file too, and does not wait for it (fs/ext4/namei.c,
  ext4_rename). Source: Documentation/admin-guide/ext4.rst of Linux: `data=ordered`, `auto_da_alloc`, `delalloc`; its
  fs/ext4/fsync.c
- `nfs-close-to-open`: a folder on an NFS server that outlives the job's machines. Changes of names are on the server's
  stable storage when their calls return (RFC 1813, section 4.8); the bytes of a file are there when the file was closed
  or synced (nfs(5), "Close-to-open cache consistency"). Without write delegations, and with an export that is `sync`.

There are too many combinations of losses to build all of them. After each change of files, in the recorded order, these
combinations are built: nothing is lost; everything that may be lost is lost; each such change is lost alone; each is
kept alone. They show every bug that needs two changes in the wrong order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torchaos.harness.crash_explorer.crash_points import CrashPoints, most_of
from torchaos.harness.crash_explorer.folder_contents import Content, Tree
from torchaos.harness.crash_explorer.fs_model import (
    ROOT,
    SYNCS,
    Effect,
    FilesystemModel,
    State,
    StateSet,
    changed,
    changes_by_file,
)
from torchaos.harness.crash_explorer.operations import Operation, OperationKind

_SURE = 1 << 20  # bytes; the largest file that auto_da_alloc protects


class Persistence(str, Enum):
    """The models of what a disk keeps, the weakest promise first."""

    STRICT = "strict"
    EXT4 = "ext4-ordered"
    NFS = "nfs-close-to-open"


@dataclass(frozen=True)
class PossiblyLost:
    """The effects that may be missing after a loss of power."""

    names: tuple[Effect, ...]  # changes of names that may be missing; with a journal also truncations
    in_order: bool  # if a change in `names` is missing, all later changes are missing too
    data: dict[int, int]  # by file: how many of its first changes are safe; only files with unsafe changes
    bound: tuple[
        tuple[int, int, int], ...
    ]  # (number, file, changes): if a change of names from this number on is kept,
    # then so many changes of the file are

    def safe(self, node: int, lost: frozenset[int]) -> int:
        """The number of changes of the file that are certainly on disk, if the changes `lost` of `names` are
        missing."""
        kept = max((e.operation.number for e in self.names if e.operation.number not in lost), default=-1)
        return max([self.data[node], *(done for number, file, done in self.bound if file == node and number <= kept)])


def possibly_lost(persistence: Persistence, effects: Sequence[Effect]) -> PossiblyLost:
    """The effects that may be missing if the power is lost after these effects."""
    if persistence is Persistence.NFS:
        return PossiblyLost((), False, _unsynced(effects, (*SYNCS, OperationKind.CLOSE)), ())
    if persistence is Persistence.STRICT:
        return PossiblyLost(_names(effects), False, _unsynced(effects, SYNCS), ())
    return _journal(effects)


def _unsynced(effects: Sequence[Effect], syncs: Sequence[OperationKind]) -> dict[int, int]:
    """By file: how many of its first changes are safe. Only files with unsafe changes."""
    numbers: dict[int, list[int]] = {}
    safe: dict[int, int] = {}
    for effect in effects:
        node, operation = effect.node, effect.operation
        if node is None:
            continue
        if effect.data:
            numbers.setdefault(node, []).append(operation.number)
        elif operation.kind in syncs:
            covers = operation.number if operation.covers is None else operation.covers
            safe[node] = sum(number < covers for number in numbers.get(node, ()))
    return {node: safe.get(node, 0) for node, done in numbers.items() if safe.get(node, 0) < len(done)}


def _names(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """The changes of names whose folders were not synced afterwards."""
    pending: list[tuple[Effect, set[int]]] = []
    for effect in effects:
        operation = effect.operation
        if effect.entries:
            new = {folder for folder, _name, node in effect.entries if node is not None}
            pending.append((effect, new or {folder for folder, _name, _node in effect.entries}))
        elif operation.kind in SYNCS:
            covers = operation.number if operation.covers is None else operation.covers
            for other, folders in pending:
                if other.operation.number < covers:
                    folders.discard(ROOT if effect.node is None else effect.node)
            pending = [each for each in pending if each[1]]
    return tuple(effect for effect, _folders in pending)


def _journal(effects: Sequence[Effect]) -> PossiblyLost:
    """The effects that may be missing with ext4, which has one journal for all changes of names, in order."""
    names: list[Effect] = []
    done: dict[int, int] = {}  # by file, how many of its changes were made
    safe: dict[int, int] = {}  # and how many of them can't be lost
    bound: list[tuple[int, int, int]] = []
    cut: set[int] = set()  # files that were truncated and not closed afterwards
    ends: dict[int, int] = {}  # the least size of each file
    for effect in effects:
        node, operation = effect.node, effect.operation
        if effect.entries or effect.size is not None:
            names.append(effect)
        if node is None:
            continue
        if effect.data:
            done[node] = done.get(node, 0) + 1
            cut |= {node} if effect.size == 0 and done[node] else set()
            ends[node] = max(ends.get(node, 0), effect.extent.end) if effect.extent else effect.size or 0
        elif effect.replaces and ends.get(node, 0) <= _SURE:
            bound.append((operation.number, node, done.get(node, 0)))
        elif operation.kind is OperationKind.CLOSE and node in cut:
            cut.discard(node)
            if ends.get(node, 0) <= _SURE:
                bound.append((operation.number + 1, node, done.get(node, 0)))
        elif operation.kind in SYNCS:
            covers = operation.number if operation.covers is None else operation.covers
            changed = done.get(node, 0) > safe.get(node, 0) or any(_is_about(name, node) for name in names)
            safe[node] = done.get(node, 0)
            if changed:
                names = [name for name in names if name.operation.number >= covers]
                # Of one file, later counts are the larger ones.
                safe |= {file: max(safe.get(file, 0), count) for number, file, count in bound if number <= covers}
    data = {node: safe.get(node, 0) for node, count in done.items() if safe.get(node, 0) < count}
    return PossiblyLost(tuple(names), True, data, tuple(bound))


def _is_about(name: Effect, node: int) -> bool:
    """Whether the change of a name also changes the inode of this file or folder."""
    return name.node == node or any(folder == node for folder, _name, _node in name.entries)


FEW = 64  # up to this number, all combinations are built
UNSEEN = 100  # classes of moments
TREES = 20  # about the number of trees that are built for each moment
RECENT = 8  # the number of latest changes that are lost one by one; earlier changes are only lost together
_PAGE, _SECTOR = 4096, 512  # bytes


@dataclass(frozen=True)
class Loss:
    """The content of a file after a loss of power, and its changes that are missing, wholly or in part."""

    content: Content
    lost: tuple[Operation, ...]


def states(points: CrashPoints, persistence: Persistence = Persistence.STRICT) -> Iterator[State]:
    """The states that a loss of power can leave at the moments of `points`, with this promise of the file system.
    If moments that need another order of the ranks than the recorded one have more than `UNSEEN` classes, they are
    examined without losses."""
    found = StateSet(points.recording, f"power loss, {persistence.value}", f"power-loss-{persistence.value}")
    for effects, times, losses in _moments(points):
        done = [effect.operation for effect in effects]
        for tree, lost in left(points.fs, effects, persistence):
            found.add(tree, done, times, lost)
            if not losses:
                break
    yield from found


def examines_all(points: CrashPoints) -> bool:
    """Whether losses are examined at every moment of `points`, except at those between two writes to one file."""
    return _every(points) == 1 and len(points.classes) <= UNSEEN


def left(
    fs: FilesystemModel, effects: Sequence[Effect], persistence: Persistence
) -> Iterator[tuple[Tree, tuple[Operation, ...]]]:
    """Yields each file tree that a power loss after these effects may leave, with the operations that are lost in it.
    In the first tree, nothing is lost."""
    may = possibly_lost(persistence, effects)
    done = changes_by_file(effects)
    names = [effect for effect in effects if effect.entries]
    for lost in _names_lost(may):
        gone = frozenset(effect.operation.number for effect in lost)
        kept = [effect for effect in names if effect.operation.number not in gone]
        options = {node: _left_of(fs, node, done[node], may, gone, persistence) for node in may.data}
        for chosen in _combinations(options, FEW // 4 if lost else FEW, 0 < len(lost) < len(may.names)):
            contents = {node: loss.content for node, loss in chosen.items()}
            tree = fs.made(kept, lambda node: contents.get(node) or fs.content_after(node, done.get(node, [])))  # noqa: B023
            missing = [effect.operation for effect in lost] + [op for loss in chosen.values() for op in loss.lost]
            yield tree, tuple(sorted(set(missing), key=lambda operation: operation.number))


def _moments(points: CrashPoints) -> Iterator[tuple[Sequence[Effect], list[tuple[float, float]], bool]]:
    """Yields, for each moment: the effects before it, (begin, end) of its times, and whether to examine losses. Losses
    are not examined between two writes to one file."""
    operations, since = points.recording.operations, points.recording.began_s
    every = _every(points)
    for done in range(len(operations) + 1):
        following = operations[done] if done < len(operations) else None
        until = points.recording.ended_s if following is None else max(since, following.ended_s)
        last = operations[done - 1] if done else None
        between = (
            last and following and last.kind is following.kind is OperationKind.WRITE and last.file == following.file
        )
        if not between and (done % every == 0 or following is None):
            yield points.fs.effects[:done], [(since, until)], True
            since = until
    for moment in points.classes:
        if moment.at is None:
            cut, _halves = points.cut(moment.positions)
            effects = [effect for effect in points.fs.effects if points.fs.has(cut, effect.operation)]
            yield effects, [], len(points.classes) <= UNSEEN


def _every(points: CrashPoints) -> int:
    """The distance, in operations, between two moments at which losses are examined: more than 1 if there are too many
    moments."""
    return 1 + TREES * len(points.recording.operations) // most_of(points.recording)


def _names_lost(may: PossiblyLost) -> list[tuple[Effect, ...]]:
    """The sets of changes of names that may be missing together: none, all, each one alone, all but one. In a journal:
    all changes from some change on."""
    names = may.names
    recent = names[-RECENT:]
    if may.in_order:
        found = [names[len(names) - count :] for count in range(len(recent) + 1)]
    elif 2 ** len(names) <= FEW:
        found = [subset for count in range(len(names) + 1) for subset in itertools.combinations(names, count)]
    else:
        found = [(), *((each,) for each in recent)]
        found += [tuple(other for other in names if other is not each) for each in recent]
    return list(dict.fromkeys([*found, names]))


def _combinations(options: dict[int, list[Loss]], few: int, only_ends: bool) -> Iterator[dict[int, Loss]]:
    """Yields combinations of files that have lost something, each with its loss. If there are at most `few`
    combinations: all of them. Otherwise: no file; all files, each with its largest loss; and, unless `only_ends`, each
    file alone with each of its losses, and all files but one."""
    if math.prod(len(losses) + 1 for losses in options.values()) <= few:
        ways = [[None, *losses] for losses in options.values()]
        for way in itertools.product(*ways):
            yield {node: loss for node, loss in zip(options, way, strict=True) if loss is not None}
        return
    recent = list(options)[-RECENT:]
    worst = {node: losses[0] for node, losses in options.items() if losses}
    yield {}
    yield worst
    for node in () if only_ends else recent:
        for loss in options[node]:
            yield {node: loss}
        yield {other: loss for other, loss in worst.items() if other != node}


def _left_of(
    fs: FilesystemModel,
    node: int,
    done: list[Effect],
    may: PossiblyLost,
    lost: frozenset[int],
    persistence: Persistence,
) -> list[Loss]:
    """The contents that can be left of a file, except the complete file; the least complete first."""
    stops = [index for index, change in enumerate(done) if change.operation.number in lost]
    if stops:  # the truncation is not in the journal, so the file is as before it
        before = done[: stops[0]]
        return [Loss(fs.content_after(node, before), tuple(change.operation for change in done[stops[0] :]))]
    safe = may.safe(node, lost)
    before, after = done[:safe], done[safe:]
    if not after:
        return []
    content, whole = fs.content_after(node, before), fs.content_after(node, done)
    truncated = [index for index, change in enumerate(after) if change.size is not None]
    if truncated:
        cut = changed(content, after[: truncated[-1] + 1])
        bases = [cut] if may.in_order else [cut, content]
    else:
        bases = [content]
    base = bases[0]
    start, end = base.size, whole.size
    lost_all = tuple(change.operation for change in after)
    found = [Loss(base, lost_all) for base in bases]
    low, high = _span(after, start, end)
    unit = _PAGE if high - low > _PAGE or persistence is not Persistence.STRICT else _SECTOR
    if high - low > unit:
        middle = low + max(unit, (high - low) // 2 // unit * unit)
        found.append(Loss(_mixed(whole, base, middle, high), lost_all))
        if persistence is not Persistence.EXT4:  # earlier bytes may be missing, and later bytes present
            found.append(Loss(_mixed(whole, base, low, low + unit, whole.size), lost_all))
    if persistence is Persistence.STRICT and end > start:
        found.append(Loss(_mixed(whole, base, low, high, whole.size), lost_all))
    return list({loss.content.digest: loss for loss in found if loss.content != whole}.values())


def _span(changes: Sequence[Effect], start: int, end: int) -> tuple[int, int]:
    """The first byte that the changes write, and the byte after the last."""
    extents = [change.extent for change in changes if change.extent is not None]
    if not extents:
        return min(start, end), max(start, end)
    return min(extent.offset for extent in extents), max(extent.end for extent in extents)


def _mixed(new: Content, old: Content, start: int, end: int, size: int | None = None) -> Content:
    """The new file, with bytes `start` to `end` - 1 of the old. `size`: its size; None: the size of the new file."""
    mixed = new.zeroed(start, end)
    for extent in old.between(start, end):
        mixed = mixed.written(extent)
    return mixed.truncated(size if size is not None else max(start, old.size) if end >= new.size else new.size)
