"""A disk in memory that records its operations, as the real recorder does; and a save by several ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from torchaos.harness.crash_explorer.folder_contents import Blobs, Content, Extent, Tree
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording


class Disk:
    """Records operations. Each takes a second: number 0 ends at 1, and so on."""

    def __init__(self, blobs: Blobs, base: Tree | None = None) -> None:
        self.blobs, self.base = blobs, base or Tree()
        self.operations: list[Operation] = []
        self.before: set[tuple[int, int]] = set()
        self.paths = set(self.base.files)
        self.files: dict[str, int] = {}
        self.numbers = count(1)
        self._waiting: list[tuple[set[int], list[int]]] = []  # ranks that still wait, and the operations before

    def rank(self, rank: int | None) -> Hand:
        return Hand(self, rank)

    def barrier(self, *ranks: int) -> None:
        """All ranks wait for each other."""
        last = {operation.rank: operation.number for operation in self.operations if operation.rank in ranks}
        self._waiting.append((set(ranks), list(last.values())))

    def do(self, kind: OperationKind, path: str, rank: int | None, **more: object) -> None:
        number = len(self.operations)
        for waiting, numbers in self._waiting:
            if rank in waiting:
                waiting.discard(rank)
                self.before |= {(a, number) for a in numbers if self.operations[a].rank != rank}
        operation = Operation(number, kind, path, rank, begun_s=number, ended_s=number + 1)
        self.operations.append(replace(operation, **more))  # type: ignore[arg-type]

    def recording(self) -> Recording:
        end = float(len(self.operations) + 1)
        stored = any(operation.kind is OperationKind.PUT for operation in self.operations)
        before = frozenset(self.before)
        return Recording(tuple(self.operations), before, self.base, self.blobs, 0.0, end, stored=stored)


@dataclass
class Hand:
    """The operations of one rank."""

    disk: Disk
    by: int | None

    def open(self, path: str) -> File:
        """Like open(path, "w"): makes a new file, or truncates it."""
        disk = self.disk
        if path in disk.paths:
            disk.files.setdefault(path, next(disk.numbers))
            disk.do(OperationKind.OPEN, path, self.by, file=disk.files[path])
            disk.do(OperationKind.TRUNCATE, path, self.by, file=disk.files[path])
        else:
            disk.paths.add(path)
            disk.files[path] = next(disk.numbers)
            disk.do(OperationKind.CREATE, path, self.by, file=disk.files[path])
        return File(self, path, disk.files[path])

    def save(self, path: str, *data: bytes, sync: bool = False) -> None:
        """Writes a file in several writes, and closes it."""
        file = self.open(path)
        for piece in data:
            file.write(piece)
        if sync:
            file.fsync()
        file.close()

    def rename(self, path: str, to: str) -> None:
        self._do(OperationKind.RENAME, path, to=to)
        for old in sorted(self.disk.paths):
            if old == path or old.startswith(f"{path}/"):
                new = to + old.removeprefix(path)
                self.disk.paths = (self.disk.paths - {old}) | {new}
                if old in self.disk.files:
                    self.disk.files[new] = self.disk.files.pop(old)

    def unlink(self, path: str) -> None:
        self.disk.paths.discard(path)
        self._do(OperationKind.UNLINK, path)

    def put(self, path: str, data: bytes) -> None:
        """Puts an object into a store."""
        self.disk.do(OperationKind.PUT, path, self.by, size=len(data), blob=self.disk.blobs.add(data))

    def mkdir(self, path: str) -> None:
        self._do(OperationKind.MKDIR, path)

    def rmdir(self, path: str) -> None:
        self._do(OperationKind.RMDIR, path)

    def fsync_folder(self, path: str = "") -> None:
        self._do(OperationKind.FSYNC_FOLDER, path)

    def _do(self, kind: OperationKind, path: str, to: str | None = None) -> None:
        self.disk.do(kind, path, self.by, to=to)


@dataclass
class File:
    hand: Hand
    path: str
    number: int
    at: int = 0

    def write(self, data: bytes) -> None:
        blob = self.hand.disk.blobs.add(data)
        more = {"file": self.number, "offset": self.at, "size": len(data), "blob": blob}
        self.hand.disk.do(OperationKind.WRITE, self.path, self.hand.by, **more)
        self.at += len(data)

    def fsync(self) -> None:
        self.hand.disk.do(OperationKind.FSYNC, self.path, self.hand.by, file=self.number)

    def close(self) -> None:
        self.hand.disk.do(OperationKind.CLOSE, self.path, self.hand.by, file=self.number)


def play(operations: Sequence[Operation], blobs: Blobs, folder: Path) -> None:
    """Repeats the operations in a real folder."""
    folder.mkdir(exist_ok=True)
    handles: dict[int | None, int] = {}
    for op in operations:
        path = folder / op.path
        if op.kind is OperationKind.CREATE:
            handles[op.file] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        elif op.kind is OperationKind.OPEN:
            handles[op.file] = os.open(path, os.O_RDWR)
        elif op.kind is OperationKind.WRITE:
            whole = Content(op.size, (Extent(0, op.size, op.blob or ""),))
            os.pwrite(handles[op.file], blobs.read(whole), op.offset)
        elif op.kind is OperationKind.TRUNCATE:
            os.ftruncate(handles[op.file], op.size)
        elif op.kind is OperationKind.RENAME:
            path.rename(folder / (op.to or ""))
        elif op.kind is OperationKind.UNLINK:
            path.unlink()
        elif op.kind is OperationKind.MKDIR:
            path.mkdir()
        elif op.kind is OperationKind.RMDIR:
            path.rmdir()
    for handle in handles.values():
        os.close(handle)


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """By path: the bytes of each file, the target of each link, and None for a folder."""
    return {path.relative_to(folder).as_posix(): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> bytes | str | None:
    if path.is_symlink():
        return os.readlink(path)
    return None if path.is_dir() else path.read_bytes()


def table(blobs: Blobs, ranks: int, leader: Sequence[str] = ("marker",)) -> Recording:
    """A save: each rank opens, writes three times, syncs and closes a file. Then rank 0 creates a marker, writes, syncs
    and renames it."""
    disk = Disk(blobs)
    for rank in range(ranks):
        disk.rank(rank).save(f"shard-{rank}", b"a" * 10, b"b" * 10, bytes([rank]) * 10, sync=True)
    disk.barrier(*range(ranks))
    first = disk.rank(0)
    for name in leader:
        file = first.open(f"{name}.tmp")
        file.write(b"done")
        file.fsync()
        first.rename(f"{name}.tmp", name)
    return disk.recording()
