"""While a job runs, covers the checkpoint folder with a FUSE file system whose server notes what processes do there. As
with a storage fault, the undo of the mount is written to disk first: if any process dies, the reaper unmounts, and the
files stay.

`ReadTracer` notes in this way what a resume asks of the folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.recording_log import PERMIT, Query
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.file_handles import File, Mount, mounts
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running import capabilities

_SERVERS = f"{__package__}.fuse_servers"
MOUNT_S = 60.0  # seconds
_END_S = 60.0  # seconds for which processes may keep files open after the end of the job
_QUIET_S = 1.0  # seconds without an operation before the server may be asked to end
_LOOK_S = 0.05
_ON = b"on\n"


class FuseMount:
    """Covers `folder`, which is made if it does not exist, in a `with` block. `home`: the folder for files of the
    server and of the undo."""

    server: ClassVar[str]  # the kind of the server, see fuse_servers.py; the server waits for its permit
    notes: ClassVar[tuple[str, ...]]  # the files that the server writes in `home`; the first grows with each operation

    def __init__(self, folder: Path, home: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.home = folder.resolve(), home.resolve()
        self._tag = f"torchaos-{self.notes[0]}-{secrets.token_hex(4)}"
        self._stack = ExitStack()
        self.reaper: ReaperClient | None = None  # has the undo of the mount; None: a reaper is started, and ended
        self._mounted = 0  # the id of the mount
        self._server: subprocess.Popen[bytes] | None = None
        self.left: list[str] = []  # after the `with` block: a sentence for each change that could not be undone
        self.failed = ""  # after the `with` block: why the notes are not complete

    def __enter__(self) -> FuseMount:
        """Mounts the file system. Raises ChaosError if that is not possible; then nothing is left mounted."""
        fuse = capabilities.check("fuse")
        if not fuse.present:
            raise ChaosError(f"{self._folder} can't be recorded: no FUSE here; {fuse.remedy}")
        self.start()
        self._prepare()
        with ExitStack() as stack:
            self._mount(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts the server. To save time, this may be done long before the `with` block. The server does nothing until
        then."""
        if self._server:
            return
        self.home.mkdir(parents=True, exist_ok=True)
        for old in self.notes:
            (self.home / old).unlink(missing_ok=True)
        argv = [sys.executable, "-m", _SERVERS, self.server, self._folder, self._tag, self._switch, self.home]
        with open(self._said, "wb") as output:
            self._server = subprocess.Popen(
                [str(part) for part in argv], stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/",
                start_new_session=True,
            )  # fmt: skip

    @property
    def is_ready(self) -> bool:
        """Whether the server was started, and lives."""
        return self._server is not None and self._server.poll() is None

    def give_up(self) -> None:
        """Ends a server that was started but is not needed."""
        if self._server and self._server.stdin:
            self._server.stdin.close()  # without a permit
            self._server.wait()

    @property
    def _said(self) -> Path:
        return self.home / "server.out"

    @property
    def _switch(self) -> Path:
        return self.home / "undo" / "cover.on"

    def _prepare(self) -> None:
        """Called before the folder is covered."""

    def _mount(self, stack: ExitStack) -> None:
        assert self._server
        assert self._server.stdin
        switch = self._switch
        stack.callback(self._stop_server)
        reaper = self.reaper or stack.enter_context(ReaperClient.start(self.home, self._tag))
        switch.parent.mkdir(mode=0o700, exist_ok=True)
        stack.callback(self._undo, reaper)
        handle = File.of(switch, switch.parent, switch.parent, hashlib.sha256(_ON).hexdigest())
        reaper.record_undo(self._tag, [Mount.of(self._folder, self._tag), handle], owner=self._tag)
        switch.write_bytes(_ON)
        with suppress(BrokenPipeError), self._server.stdin as permit:  # it may have died
            permit.write(PERMIT.encode())
        end = time.monotonic() + MOUNT_S
        while not self._mounted:
            self._mounted = next((mount.id for mount in mounts() if mount.source == self._tag), 0)
            if self._server.poll() is not None or time.monotonic() > end:
                lines = self._said.read_text(errors="replace").strip().splitlines()
                why = lines[-1] if lines else "no reason was given"
                raise ChaosError(f"{self._folder} can't be recorded: FUSE could not cover it: {why}")
            time.sleep(0.005)

    def _undo(self, reaper: ReaperClient) -> None:
        try:
            self.left += [str(result.reason) for result in reaper.undo(self._tag) if not result.verified]
        except UndoError as error:
            self.left.append(str(error))

    def _stop_server(self) -> None:
        """Waits for the server's last line. The server ends by itself when the folder is unmounted and no file is open;
        but a mount namespace that another program made meanwhile keeps it alive. So the server is asked to end if no
        process has a file open and nothing more is written."""
        if self._server is None:
            return
        at_first = written = self._written()
        begun = since = time.monotonic()
        while self._server.poll() is None:
            now = time.monotonic()
            if self._written() != written:
                written, since = self._written(), now
            quiet = now - since > _QUIET_S and not (self._mounted and processes.have_open(self._mounted))
            if quiet or now - begun > _END_S:
                code = self._end_server()
                if self._written() > at_first and not quiet:
                    self.failed = "a process that outlived the job still had a file of it open"
                    return
                break
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(_LOOK_S)
        else:
            code = self._server.wait()
        self.failed = f"the server ended before, with exit code {code}" if code else ""

    def _written(self) -> int:
        """The size of the server's notes, in bytes."""
        path = self.home / self.notes[0]
        return path.stat().st_size if path.exists() else 0

    def _end_server(self) -> int:
        """Asks the server to end although the mount is still in use, for example by another mount namespace. Returns 0,
        or the exit code if the server had to be killed."""
        assert self._server is not None
        self._server.terminate()
        try:
            self._server.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            return self._server.wait()
        return 0


# What a resume asks of the checkpoint folder: which files exist and how long they are, which names a folder has, and
# the bytes of files. If two states give the same answers, a deterministic job does the same from both.

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class ReadSet:
    """The questions that a process asked of the folder, as pairs of a question and a path."""

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
        """The questions before `end_s` (CLOCK_MONOTONIC); to be called after the `with` block. None if not all
        questions are known, or if none was about the folder's contents: then the failure does not come from the
        folder."""
        lines = (self.home / "looks").read_text().splitlines() if not self.failed else ()
        found = ReadSet.from_json((ask, path) for at_s, ask, path in map(json.loads, lines) if at_s < end_s)
        return found if found.asked - {(Query.IS, "")} else None


class ReadTracers:
    """Gives a ReadTracer to each of many resumes, one after the other. To save time, they share a reaper, and the
    server for the next resume is started while the last resume is judged."""

    def __init__(self, home: Path) -> None:
        """`home`: a folder for files of the servers. It is removed in the end, unless something is still mounted."""
        self._home, self._count = home, 0
        self._reaper: ReaperClient | None = None
        self._next: ReadTracer | None = None
        shutil.rmtree(home, ignore_errors=True)

    def tracer(self, folder: Path) -> ReadTracer:
        """The tracer for the next resume. `folder`: its checkpoint folder."""
        found, self._next = self._next, None
        if not (found and found.is_ready):
            found = self._new(folder)
        found.reaper = self._living()
        return found

    def prepare(self, folder: Path) -> None:
        """Starts the server for the next resume in the same folder."""
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


class TracedResume:
    """A `with` block around a resume. Without `tracers`, the questions of the resume are not noted."""

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
        """The questions of the job. Those of the harness, which reads the checkpoints after the job's end, are left
        out."""
        if self._tracer is None:
            return None
        stages = record.of_kind(Kind.STAGE)
        ended_s = max((stage.mono_s for stage in stages if stage.data["stage"] == "inventory"), default=math.inf)
        found = self._tracer.until(ended_s)
        if not self.left:
            shutil.rmtree(self._tracer.home, ignore_errors=True)
        return found
