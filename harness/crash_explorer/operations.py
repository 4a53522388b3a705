"""The operations of a run on a folder, in order; the step and phase of each; and the pairs of operations of different
ranks whose order is fixed, because ranks wait for each other in collectives.

On one machine, the agent and the recorder read the same clock, CLOCK_MONOTONIC; times of other nodes are corrected by
the journal. An operation belongs to the step after the last step that its rank had finished.

An operation comes before a collective if it had ended when its rank began the collective, and after the collective if
it began when its rank had already begun the collective. Some collectives do not wait (asynchronous collectives, and a
broadcast for its root), but are treated as if they did. So some possible moments are not tried. No impossible moment is
tried, unless ranks wait for each other in other ways than collectives.

If a background thread runs collectives of its own (an asynchronous save), its operations are ordered by these
collectives, and by everything that began before the thread did anything. All other threads are ordered by all
collectives of their rank."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from torchaos.harness.crash_explorer.folder_contents import Blobs, Content, Extent, Tree
from torchaos.harness.fault_drivers.storage_faults import rank_of
from torchaos.harness.protocol.collective_stamps import Stamp, read_stamps
from torchaos.harness.protocol.wire import ENV_PLAN, Event, Kind, Phase

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
    began_s: float = 0.0  # seconds of CLOCK_MONOTONIC: when the job began or, if that is not known, the recorder
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
        """The paths of files that did not change after they were first closed, as far as was seen. Empty for a store:
        there, each state gives its objects their own times."""
        if self.stored:
            return frozenset()
        paths = {path for operation in self.operations for path in (operation.path, operation.to) if path}
        return frozenset(
            paths - {operation.path for operation in self.operations if operation.kind is OperationKind.OPEN}
        )

    def write(self, folder: Path) -> None:
        """Writes the recording into the folder; its blobs stay in their own folder. Raises OSError if it can't be
        written."""
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


def with_steps(operations: Sequence[Operation], events: Iterable[Event]) -> tuple[Operation, ...]:
    """The operations with their steps, counted from 1 in each attempt. Operations during a save of their rank get the
    phase `checkpoint_write`. Operations of a rank without events are unchanged."""
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


_KNOWN_S = 1.0  # seconds for which a thread number is known; later it may be used by another thread
_PERIOD_S = 0.01
_COUNT_AT = 48  # offset of the number of collectives so far, in a file of stamps


@dataclass(frozen=True)
class Writer:
    rank: int | None
    pid: int


class Writers:
    """Finds the process and the rank of a thread. From a rank's first operation on, copies its collectives from the
    agent's stamps to the file `to`, before newer stamps replace them. Writes the path of each agent's plan to
    `plans`."""

    def __init__(self, to: Path, plans: Path) -> None:
        self._to = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._said = plans
        self._known: dict[int, tuple[float, Writer]] = {}
        self._folders: set[Path] = set()  # folders of stamps
        self._copied: dict[Path, int] = {}  # how many collectives of each file are copied
        self._looked: set[int] = set()  # pids whose plan was searched for
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stamps", daemon=True)
        self._thread.start()

    def of(self, tid: int) -> Writer:
        now = time.monotonic()
        since, writer = self._known.get(tid, (0.0, None))
        if writer is None or now - since > _KNOWN_S:
            writer = Writer(rank_of(tid), _process_of(tid))
            self._known[tid] = (now, writer)
            if writer.rank is not None and writer.pid not in self._looked:
                self._looked.add(writer.pid)
                self._find_plan(writer.pid)
        return writer

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._copy_all()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._copy_all()

    def _find_plan(self, pid: int) -> None:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return
        plan = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry).get(ENV_PLAN.encode())
        if plan and (folder := Path(os.fsdecode(plan)).parent / "stamps") not in self._folders:
            self._folders.add(folder)
            with open(self._said, "ab") as file:
                file.write(plan + b"\n")

    def _copy_all(self) -> None:
        for path in [path for folder in list(self._folders) for path in folder.glob("*.stamps")]:
            copied = self._copied.get(path, 0)
            try:
                with open(path, "rb") as file:
                    head = file.read(_COUNT_AT + 8)
                if struct.unpack_from("q", head, _COUNT_AT)[0] == copied:
                    continue
                stamps = [stamp for stamp in read_stamps(path) if stamp.number > copied]
            except (OSError, ValueError, struct.error):
                continue
            for stamp in stamps:
                os.write(self._to, json.dumps(asdict(stamp)).encode() + b"\n")
            self._copied[path] = max((stamp.number for stamp in stamps), default=copied)


def _process_of(tid: int) -> int:
    try:
        with open(f"/proc/{tid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
    except (OSError, StopIteration):
        return tid


_UNKNOWN = (
    "{} writes, and when it waited for others is not known: its operations are tried only in the order that was seen"
)


def order(
    operations: Sequence[Operation], stamps: Sequence[Stamp]
) -> tuple[frozenset[tuple[int, int]], tuple[str, ...]]:
    """The order between ranks: pairs (a, b) of numbers of operations, where a ends before b can begin. Also sentences
    about what is not known."""
    if len({operation.rank for operation in operations}) < 2:
        return frozenset(), ()
    by_pid: dict[int, list[Stamp]] = {}
    for stamp in sorted(stamps, key=lambda each: each.number):
        by_pid.setdefault(stamp.pid, []).append(stamp)
    whole = {pid: own for pid, own in by_pid.items() if all(b.number - a.number == 1 for a, b in pairwise(own))}
    unknown = {operation.pid: operation.rank for operation in operations if operation.pid not in whole}
    names = {"a process of no rank" if rank is None else f"rank {rank}" for rank in unknown.values()}
    pairs = _waits(operations, whole) | _as_seen(operations, unknown)
    return frozenset(pairs), tuple(_UNKNOWN.format(name) for name in sorted(names))


def _as_seen(operations: Sequence[Operation], unknown: Mapping[int, object]) -> set[tuple[int, int]]:
    """Pairs of operations, the earlier first: one of a process whose order is `unknown`, and one of another rank. These
    pairs keep the operations of such processes at their recorded places."""
    pairs = set()
    for way in (operations, operations[::-1]):
        last: dict[int | None, int] = {}
        for operation in way:
            if operation.pid in unknown:
                pairs |= {(number, operation.number) for rank, number in last.items() if rank != operation.rank}
            last[operation.rank] = operation.number
    return {(min(pair), max(pair)) for pair in pairs}


def _waits(operations: Sequence[Operation], stamps: Mapping[int, Sequence[Stamp]]) -> set[tuple[int, int]]:
    last: dict[tuple[object, ...], list[tuple[int | None, int]]] = {}  # by collective: (rank, last operation before it)
    first: dict[tuple[object, ...], list[tuple[int | None, int]]] = {}  # likewise: (rank, first operation after it)
    for pid, own in stamps.items():
        mine = [operation for operation in operations if operation.pid == pid]
        threads = _Threads.of(mine, own)
        for stamp in own:
            same = (stamp.attempt, stamp.group, stamp.seq)
            before = max((thread.before(stamp) for thread in threads), default=-1)
            after = min((thread.after(stamp) for thread in threads), default=len(operations))
            if before >= 0 and stamp.op != "recv":  # nobody waits for a receiver
                last.setdefault(same, []).append((stamp.rank, before))
            if after < len(operations) and stamp.op != "send":
                first.setdefault(same, []).append((stamp.rank, after))
    return {
        (a, b)
        for same, lasts in last.items()
        for rank, a in lasts
        for other, b in first.get(same, ())
        if rank != other and a < b
    }


@dataclass(frozen=True)
class _Threads:
    """The operations of one background thread that runs collectives of its own, or of all other threads of its rank."""

    own: int  # the number of the thread; 0: all other threads
    began_s: float
    ended_s: float
    ends: list[float]  # in order
    lasts: list[int]  # index as in the ends above: the highest number of an operation that had ended by then
    begins: list[float]  # in order
    firsts: list[int]  # index as in the begins above: the lowest number of an operation that began then or later

    @classmethod
    def of(cls, operations: Sequence[Operation], stamps: Sequence[Stamp]) -> list[_Threads]:
        own = {stamp.thread for stamp in stamps if stamp.thread}
        found = []
        for thread in (0, *sorted(own)):
            mine = [op for op in operations if (op.tid == thread if thread else op.tid not in own)]
            if mine:
                at = [stamp.start_mono_s for stamp in stamps if stamp.thread == thread]
                found.append(cls._of(thread, mine, at))
        return found

    @classmethod
    def _of(cls, thread: int, operations: Sequence[Operation], at: Iterable[float]) -> _Threads:
        ended = sorted((op.ended_s, op.number) for op in operations)
        begun = sorted((op.begun_s, op.number) for op in operations)
        lasts = list(accumulate((number for _end, number in ended), max))
        firsts = list(accumulate((number for _begin, number in reversed(begun)), min))[::-1]
        moments = [begun[0][0], ended[-1][0], *at]
        return cls(
            thread,
            min(moments),
            max(moments),
            [end for end, _n in ended],
            lasts,
            [begin for begin, _n in begun],
            firsts,
        )

    def before(self, stamp: Stamp) -> int:
        """The last operation that had ended when the collective began; -1 if the collective orders none."""
        if self.own not in (0, stamp.thread) and self.ended_s > stamp.start_mono_s:
            return -1
        index = bisect_right(self.ends, stamp.start_mono_s)
        return self.lasts[index - 1] if index else -1

    def after(self, stamp: Stamp) -> int:
        """The first operation that began after the collective; a very large number if the collective orders none."""
        if self.own not in (0, stamp.thread) and self.began_s < stamp.start_mono_s:
            return 1 << 62
        index = bisect_left(self.begins, stamp.start_mono_s)
        return self.firsts[index] if index < len(self.firsts) else 1 << 62
