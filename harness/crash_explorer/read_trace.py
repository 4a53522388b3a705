"""What a resume asks of the checkpoint folder: which files exist and how long they are, which names a folder has, and
the bytes of files. If two states give the same answers, a deterministic job does the same from both."""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.fuse_mount import FuseMount
from torchaos.harness.crash_explorer.recording_log import Query
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class ReadSet:
    """The questions that were asked, as pairs of a question and a path."""

    asked: frozenset[tuple[Query, str]]

    def same(self, one: Tree, other: Tree) -> bool:
        """Whether both trees answer all these questions alike."""
        return all(_answer(one, *asked) == _answer(other, *asked) for asked in self.asked)

    def to_json(self) -> list[list[str]]:
        return sorted([ask.value, path] for ask, path in self.asked)

    @classmethod
    def from_json(cls, raw: Iterable[tuple[str, str]]) -> ReadSet:
        return cls(frozenset((Query(ask), path) for ask, path in raw))


def _answer(tree: Tree, ask: Query, path: str) -> object:
    content = tree.files.get(path)
    if ask is Query.BYTES:
        return content.digest if content else None
    if ask is Query.NAMES:
        names = tree.names.get(path)
        return None if names is None else {name: _kind(tree, f"{path}/{name}".lstrip("/")) for name in names}
    if ask is Query.CLEARED:
        below, start = tree.below(path), len(path) + bool(path)
        paths = (*below.files, *below.folders, *below.links)
        return path in tree.names and {(_DIGITS.sub("#", each[start:]), _kind(tree, each)) for each in paths}
    if ask is Query.ALL:
        return tree.below(path).digest
    return ("file", content.size) if content and ask is Query.IS else _kind(tree, path)


def _kind(tree: Tree, path: str) -> object:
    return "file" if path in tree.files else tree.links.get(path, path in tree.names)


class ReadTracer(FuseMount):
    """Notes what is asked of the folder in a `with` block. `home` must be fresh."""

    server = "looks"
    notes = ("looks",)

    def until(self, end_s: float) -> ReadSet | None:
        """The questions before `end_s` (CLOCK_MONOTONIC), after the `with` block. None if not all are known, or if none
        was about the contents: then the failure does not come from the folder."""
        lines = (self.home / "looks").read_text().splitlines() if not self.failed else ()
        found = ReadSet.from_json((ask, path) for at_s, ask, path in map(json.loads, lines) if at_s < end_s)
        return found if found.asked - {(Query.IS, "")} else None


class ReadTracers:
    """Gives a ReadTracer to each of many resumes, one after the other. To save time, they share a reaper, and the
    server of the next resume is started while the present one, which has ended, is judged."""

    def __init__(self, home: Path) -> None:
        """`home`: a folder for files of the servers; it is removed in the end, unless a mount is left."""
        self._home, self._count = home, 0
        self._reaper: ReaperClient | None = None
        self._next: ReadTracer | None = None
        shutil.rmtree(home, ignore_errors=True)

    def tracer(self, folder: Path) -> ReadTracer:
        """The tracer for the next resume, which has this checkpoint folder."""
        found, self._next = self._next, None
        if not (found and found.is_ready):
            found = self._new(folder)
        found.reaper = self._living()
        return found

    def prepare(self, folder: Path) -> None:
        """Starts the server of the next resume, which has the same folder."""
        self._next = self._new(folder)
        self._next.start()

    def close(self) -> None:
        if self._next:
            self._next.give_up()
        if self._reaper and all(result.verified for result in self._reaper.close()):
            shutil.rmtree(self._home, ignore_errors=True)

    def _new(self, folder: Path) -> ReadTracer:
        self._count += 1
        return ReadTracer(folder, self._home / str(self._count))

    def _living(self) -> ReaperClient:
        if self._reaper:
            try:
                self._reaper.check()
            except UndoError:  # it was killed
                self._reaper.close()
                self._reaper = None
        if self._reaper is None:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._reaper = ReaperClient.start(self._home, f"torchaos-lookout-{secrets.token_hex(4)}")
        return self._reaper


class Traced:
    """A `with` block around a resume. The questions of the resume are noted only if `tracers` is given."""

    def __init__(self, folder: Path, tracers: ReadTracers | None) -> None:
        self._folder, self._tracers = folder, tracers
        self._tracer = tracers.tracer(folder) if tracers else None

    def __enter__(self) -> None:
        if self._tracer:
            self._tracer.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._tracer:
            self._tracer.__exit__(kind, error, at)
        if self._tracers:
            self._tracers.prepare(self._folder)

    @property
    def left(self) -> list[str]:
        return self._tracer.left if self._tracer else []

    @property
    def failed(self) -> str:
        return self._tracer.failed if self._tracer else ""

    def before_inventory(self, record: Record) -> ReadSet | None:
        """The questions of the job, without those of the harness, which reads the checkpoints after the job's end."""
        if self._tracer is None:
            return None
        stages = record.of_kind(Kind.STAGE)
        ended_s = max((stage.mono_s for stage in stages if stage.data["stage"] == "inventory"), default=math.inf)
        found = self._tracer.until(ended_s)
        if not self.left:
            shutil.rmtree(self._tracer.home, ignore_errors=True)
        return found
