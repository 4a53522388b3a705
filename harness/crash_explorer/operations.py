"""The operations of a run on a folder, in order, and which operations must come before which."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

from torchaos.harness.agent.wire import Event, Kind, Phase
from torchaos.harness.crash_explorer.folder_contents import Blobs, Content, Extent, Tree

_VERSION = 1


class OperationKind(str, Enum):
    """The kind of an operation. `path`: the file or folder that it changes. `to`: the second path, for example the new
    name."""

    CREATE = "create"  # a new, empty file; also with O_EXCL
    OPEN = "open"  # opens an existing file for writing
    WRITE = "write"
    TRUNCATE = "truncate"  # changes the length to `size` bytes; O_TRUNC is a truncate too
    RENAME = "rename"  # to `to`; a file or empty folder with that name is removed
    LINK = "link"  # `to` is a second name of `path`
    SYMLINK = "symlink"  # `path` is a new link to `to`
    UNLINK = "unlink"  # removes a file, or an object if it is there
    MKDIR = "mkdir"
    RMDIR = "rmdir"
    FSYNC = "fsync"
    FDATASYNC = "fdatasync"
    FSYNC_FOLDER = "fsync_folder"
    CLOSE = "close"  # closes a file that was open for writing
    PUT = "put"  # of an object store: `path` becomes a new file of `size` bytes, or is replaced by it, at once


@dataclass(frozen=True)
class Operation:
    """A change of the folder, or a sync of an earlier change. Paths are relative to the folder, with `/`; "" is the
    folder."""

    number: int  # its place in the order in which the recorder saw the operations
    kind: OperationKind
    path: str
    rank: int | None = None  # None: the process is not a rank
    pid: int = 0
    tid: int = 0
    to: str | None = None
    file: int | None = None  # the number of the file, whatever its names are; a new file has a new number
    offset: int = 0  # bytes, of a write
    size: int = 0  # bytes, of a write or put; the new size of a truncate
    blob: str | None = None  # the digest of the bytes that were written or put
    step: int | None = None  # the step of the attempt that the rank was in, counted from 1; None: unknown
    phase: str | None = None  # the phase of that step
    covers: int | None = None  # of a sync or close: it covers the operations before this number; None: before itself
    begun_s: float = 0.0  # seconds of CLOCK_MONOTONIC
    ended_s: float = 0.0

    def __str__(self) -> str:
        who = "somebody" if self.rank is None else f"rank {self.rank}"
        rest = {
            OperationKind.RENAME: f" to {self.to}",
            OperationKind.LINK: f" as {self.to}",
            OperationKind.SYMLINK: f" to {self.to}",
        }
        rest |= {OperationKind.PUT: f" ({self.size} bytes)"}
        rest |= {
            OperationKind.WRITE: f" ({self.size} bytes at {self.offset})",
            OperationKind.TRUNCATE: f" to {self.size} bytes",
        }
        return f"{who}: {self.kind.value} {self.path or '.'}{rest.get(self.kind, '')}"


@dataclass(frozen=True)
class Recording:
    """The operations of one run in a folder. `blobs`: the bytes that it wrote."""

    operations: tuple[Operation, ...]
    before: frozenset[tuple[int, int]]  # (a, b): a ends before b can begin; only pairs of different ranks
    base: Tree  # the contents of the folder before the first operation
    blobs: Blobs = field(compare=False, repr=False)
    began_s: float = 0.0  # CLOCK_MONOTONIC, seconds: begin of the job if known, otherwise of the recorder
    ended_s: float = 0.0
    unsure: tuple[str, ...] = ()  # sentences about what the recorder could not see
    stored: bool = False  # the files are the objects of a store, which has no folders

    @cached_property
    def lines(self) -> dict[int | None, tuple[Operation, ...]]:
        """The operations of each rank in order. The key None: operations of processes that are not a rank."""
        found: dict[int | None, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.rank, []).append(operation)
        return {rank: tuple(found[rank]) for rank in sorted(found, key=lambda rank: (rank is None, rank))}

    @cached_property
    def kept_as_made(self) -> frozenset[str]:
        """The paths of files that, as far as was seen, did not change after they were first closed. None of a store:
        the objects of each state have their own times."""
        if self.stored:
            return frozenset()
        paths = {path for operation in self.operations for path in (operation.path, operation.to) if path}
        return frozenset(
            paths - {operation.path for operation in self.operations if operation.kind is OperationKind.OPEN}
        )

    def write(self, folder: Path) -> None:
        """Writes the recording into the folder; its blobs stay in their own folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "operations.jsonl").write_text("".join(_line(operation) for operation in self.operations))
        about = {
            "version": _VERSION, "before": sorted(self.before), "base": _tree_to_json(self.base),
            "blobs": str(self.blobs.folder), "began_s": self.began_s, "ended_s": self.ended_s,
            "unsure": list(self.unsure), "stored": self.stored,
        }  # fmt: skip
        (folder / "recording.json").write_text(json.dumps(about))

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Reads the recording in a folder. Raises OSError, and ValueError if the folder holds no recording."""
        try:
            about = json.loads((folder / "recording.json").read_text())
            if about["version"] != _VERSION:
                raise ValueError(f"{folder}: a recording of version {about['version']}; this torchaos reads {_VERSION}")
            lines = (folder / "operations.jsonl").read_text().splitlines()
            return cls(
                tuple(_operation(line) for line in lines), frozenset((a, b) for a, b in about["before"]),
                _tree_of_json(about["base"]), Blobs(folder / about["blobs"]),
                about["began_s"], about["ended_s"], tuple(about["unsure"]), bool(about.get("stored")),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder}: not a recording: {error}") from error


def _line(operation: Operation) -> str:
    raw = {name: value for name, value in asdict(operation).items() if value not in (None, "")}
    return json.dumps({"path": operation.path, **raw, "kind": operation.kind.value}) + "\n"


def _operation(line: str) -> Operation:
    raw = json.loads(line)
    return Operation(**{**raw, "kind": OperationKind(raw["kind"])})


def _tree_to_json(tree: Tree) -> dict[str, object]:
    files = {
        path: [content.size, [[e.offset, e.size, e.blob, e.start] for e in content.extents]]
        for path, content in tree.files.items()
    }
    return {"files": files, "folders": sorted(tree.folders), "links": dict(tree.links)}


def _tree_of_json(raw: dict[str, dict[str, tuple[int, Iterable[tuple[int, int, str, int]]]]]) -> Tree:
    files = {path: Content(size, tuple(Extent(*e) for e in extents)) for path, (size, extents) in raw["files"].items()}
    return Tree(files, frozenset(raw["folders"]), dict(raw["links"]))  # type: ignore[arg-type]


# Finds in which step and phase of its rank each operation was. On one machine, the agent and the recorder read the same
# clock, CLOCK_MONOTONIC; times of other nodes are corrected by the journal. An operation belongs to the step after the
# last step that its rank had finished.


def with_steps(operations: Sequence[Operation], events: Iterable[Event]) -> tuple[Operation, ...]:
    """The operations with their steps, counted from 1 in each attempt. Operations during a save of their rank get the
    phase `checkpoint_write`. An operation of a rank without events is returned unchanged."""
    steps: dict[int, list[tuple[float, int]]] = {}
    saves: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event.rank is None:
            continue
        if event.kind is Kind.AGENT_STARTED:
            steps.setdefault(event.rank, []).append((event.mono_s, 0))
        elif event.kind is Kind.STEP and event.step is not None:
            steps.setdefault(event.rank, []).append((event.mono_s, event.step))
        elif event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END):
            saves.setdefault(event.rank, []).append((event.mono_s, 1 if event.kind is Kind.SAVE_BEGIN else -1))
    for timed in (*steps.values(), *saves.values()):
        timed.sort()

    def placed(operation: Operation) -> Operation:
        done = steps.get(operation.rank, []) if operation.rank is not None else []
        at = bisect_right(done, (operation.begun_s, 1 << 62))
        if not at:
            return operation
        begun = [change for when, change in saves.get(operation.rank or 0, ()) if when <= operation.begun_s]
        phase = Phase.CHECKPOINT_WRITE.value if sum(begun) > 0 else None
        return replace(operation, step=done[at - 1][1] + 1, phase=phase)

    return tuple(placed(operation) for operation in operations)
