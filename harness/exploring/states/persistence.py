"""What a disk keeps when its power goes: three models, each a promise that file systems make.

- `strict`: only what was synced is there. The bytes of a file need fsync(2) of the file, its name needs fsync(2) of its
  folder. All else may be there or not, in any order. Source: POSIX.1-2024, fsync(); and fsync(2) of Linux: "Calling
  fsync() does not necessarily ensure that the entry in the directory containing the file has also reached disk. For
  that an explicit fsync() on a file descriptor for the directory is also needed."
- `ext4-ordered`: ext4 on one machine as it is mounted by default. Changes of names and truncations are in a journal and
  are kept in order: a beginning of them is there. An fsync that has something to commit commits all earlier ones, of
  all processes. Bytes that were not synced may be missing from the end of a file, in blocks of 4096. A file of at most
  1 MiB that is renamed onto another (or truncated, written again and closed) has its bytes before the rename is kept.
  The kernel begins to write a larger file too, and does not wait for it (fs/ext4/namei.c, ext4_rename). Source:
  Documentation/admin-guide/ext4.rst of Linux: `data=ordered`, `auto_da_alloc`, `delalloc`; its fs/ext4/fsync.c
- `nfs-close-to-open`: a folder on an NFS server that outlives the job's machines. Changes of names are on the server's
  stable storage when they return (RFC 1813, section 4.8); the bytes of a file are when it was closed or synced (nfs(5),
  "Close-to-open cache consistency"). Without write delegations, and with an export that is `sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchaos.harness.exploring.operations import Kind
from torchaos.harness.exploring.states.world import ROOT, SYNCS, Effect

_SURE = 1 << 20  # bytes; the largest file that auto_da_alloc protects


class Persistence(str, Enum):
    """The models, weakest promise first."""

    STRICT = "strict"
    EXT4 = "ext4-ordered"
    NFS = "nfs-close-to-open"


@dataclass(frozen=True)
class Unsure:
    """The effects that may be missing after a loss of power, out of all effects before it."""

    names: tuple[Effect, ...]  # changes of names that may be missing; in a journal also truncations
    in_order: bool  # if a change in `names` is missing, all later changes are missing too
    data: dict[int, int]  # by file: how many of its changes are safe, if some are not
    bound: tuple[
        tuple[int, int, int], ...
    ]  # (number, file, changes): if a change of names from this number on is kept,
    # then so many changes of the file are

    def safe(self, node: int, lost: frozenset[int]) -> int:
        """The number of changes of the file that are certainly on disk, if the changes `lost` of `names` are
        missing."""
        kept = max((e.operation.number for e in self.names if e.operation.number not in lost), default=-1)
        return max([self.data[node], *(done for number, file, done in self.bound if file == node and number <= kept)])


def unsure(persistence: Persistence, effects: Sequence[Effect]) -> Unsure:
    """The effects that may be missing if the power is lost after these effects."""
    if persistence is Persistence.NFS:
        return Unsure((), False, _unsynced(effects, (*SYNCS, Kind.CLOSE)), ())
    if persistence is Persistence.STRICT:
        return Unsure(_names(effects), False, _unsynced(effects, SYNCS), ())
    return _journal(effects)


def _unsynced(effects: Sequence[Effect], syncs: Sequence[Kind]) -> dict[int, int]:
    """By file: how many of its changes are safe. Only files with unsafe changes."""
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


def _journal(effects: Sequence[Effect]) -> Unsure:
    """The unsure effects with ext4: one journal for all changes of names, in order."""
    names: list[Effect] = []
    done: dict[int, int] = {}
    safe: dict[int, int] = {}
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
        elif operation.kind is Kind.CLOSE and node in cut:
            cut.discard(node)
            if ends.get(node, 0) <= _SURE:
                bound.append((operation.number + 1, node, done.get(node, 0)))
        elif operation.kind in SYNCS:
            covers = operation.number if operation.covers is None else operation.covers
            changed = done.get(node, 0) > safe.get(node, 0) or any(_is_about(name, node) for name in names)
            safe[node] = done.get(node, 0)
            if changed:
                names = [name for name in names if name.operation.number >= covers]
                for number, file, count in bound:
                    if number <= covers:
                        safe[file] = max(safe.get(file, 0), count)
    data = {node: safe.get(node, 0) for node, count in done.items() if safe.get(node, 0) < count}
    return Unsure(tuple(names), True, data, tuple(bound))


def _is_about(name: Effect, node: int) -> bool:
    """Whether the change of a name also changes the inode of this file or folder."""
    return name.node == node or any(folder == node for folder, _name, _node in name.entries)
