"""Serves the checkpoint folder over itself by FUSE while a job runs, by a server that notes what processes do there. As
with a storage fault, the undo of the mount is written to disk first: if any process dies, the reaper unmounts, and the
files stay."""

from __future__ import annotations

import hashlib
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from torchaos.harness.crash_explorer.recording_log import PERMIT
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.rollback.file_handles import File, Mount, mounts
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running import capabilities

_SERVERS = f"{__package__}.fuse_servers"
MOUNT_S = 60.0  # seconds
_END_S = 60.0  # seconds for which processes may keep files open after the end of the job
_QUIET_S = 1.0  # seconds without an operation, after which the server may be asked to end
_LOOK_S = 0.05
_ON = b"on\n"


class FuseMount:
    """Covers `folder`, which is made if it does not exist, in a `with` block. `home`: the folder for files of the
    server and of the undo."""

    server: ClassVar[str]  # its kind, see fuse_servers.py; it waits for its permit
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
        """Starts the server, which does nothing yet. This may come long before the `with` block, to save its time."""
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
        """Ends a server that was started, and is not needed."""
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
        """Waits for the server's last line. The server ends by itself when the folder is unmounted and no file is open.
        A mount namespace that another program made meanwhile also keeps the server alive. So the server is asked to end
        if no process has a file open and nothing is written any more."""
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
        """Asks the server to end although the mount is still in use, for example by a mount namespace that was made
        meanwhile. Returns 0, or the exit code if it had to be killed."""
        assert self._server is not None
        self._server.terminate()
        try:
            self._server.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            return self._server.wait()
        return 0
