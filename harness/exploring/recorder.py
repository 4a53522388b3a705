"""Records what a run does to its checkpoint folder: meanwhile, the folder is served over itself by FUSE (serving.py).
FUSE sees writes of native code (the zip files of torch.save, safetensors, io_uring) and of all processes, in one order,
and needs no hooks in the ranks. It costs a copy and a digest of all bytes that are written. As with a storage fault,
the undo of the mount is guarded first: if any process dies, the reaper unmounts, and the files stay."""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torchaos.harness.agent.plan import AgentPlan
from torchaos.harness.agent.stamps import Stamp
from torchaos.harness.agent.wire import Event
from torchaos.harness.contracts import ChaosError
from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.order import order
from torchaos.harness.exploring.steps import with_steps
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.running import capabilities
from torchaos.harness.undo.client import Reaper, UndoError
from torchaos.harness.undo.file import File
from torchaos.harness.undo.mount import Mount, mounts

# The agent's hooks that show when ranks wait for each other. Without them, only the recorded order of operations is
# tried.
HOOKS = ("collectives", "stamps")
MOUNT_S = 60.0  # seconds
_END_S = 60.0  # seconds for which processes may keep files open after the end of the job
_ON = b"on\n"


class Recorder:
    """Records the operations of a job in its checkpoint folder: `with Recorder(folder, home) as recorder: run the job`,
    and then read `recorder.recording`. `folder`: the checkpoint folder; it is made if it does not exist. `home`: the
    folder for the recording's own files, on a disk with room for all bytes that the run writes. The contents that
    `folder` had before are copied, and kept as `recording.base`."""

    def __init__(self, folder: Path, home: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._home = folder.resolve(), home.resolve()
        self._tag = f"torchaos-recorder-{secrets.token_hex(4)}"
        self._stack = ExitStack()
        self._server: subprocess.Popen[bytes] | None = None
        self.left: list[str] = []  # after the `with` block: a sentence for each change that could not be undone
        self._failed = ""  # why the recording is not complete

    def __enter__(self) -> Recorder:
        """Mounts the file system. Raises ChaosError if that is not possible; then nothing is left mounted."""
        with ExitStack() as stack:
            self._mount(stack)
            self._stack = stack.pop_all()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended_s = time.monotonic()
        self._stack.close()
        self._events = _events(self._home / "plans")  # now, because the caller may move the run

    @property
    def recording(self) -> Recording:
        """The recording, after the `with` block. Raises ChaosError if it is not complete, and OSError."""
        if self._failed:
            raise ChaosError(f"{self._folder}: the recording is not whole: {self._failed}")
        operations = tuple(Operation(**{**raw, "kind": Kind(raw["kind"])}) for raw in _lines(self._home / "operations"))
        stamps = [
            Stamp(**{**raw, "ranks": raw["ranks"] and tuple(raw["ranks"])})
            for raw in _lines(self._home / "collectives")
        ]
        before, unsure = order(operations, stamps)
        return Recording(
            with_steps(operations, self._events), before, self._base, Blobs(self._home / "blobs"), self._began_s,
            self._ended_s, unsure,
        )  # fmt: skip

    def _mount(self, stack: ExitStack) -> None:
        fuse = capabilities.check("fuse")
        if not fuse.present:
            raise ChaosError(f"{self._folder} can't be recorded: no FUSE here; {fuse.remedy}")
        self._home.mkdir(parents=True, exist_ok=True)
        for old in ("operations", "collectives", "plans"):
            (self._home / old).unlink(missing_ok=True)
        blobs = Blobs(self._home / "blobs")
        self._base = blobs.take(self._folder)
        blobs.close()
        reaper = stack.enter_context(Reaper.start(self._home, self._tag))
        stack.callback(self._stop_server)
        stack.callback(self._heal, reaper)
        switch = self._home / "undo" / "recorder.on"
        handle = File.of(switch, switch.parent, switch.parent, hashlib.sha256(_ON).hexdigest())
        reaper.guard("recorder", [Mount.of(self._folder, self._tag), handle], owner="recorder")
        switch.write_bytes(_ON)
        argv = [sys.executable, "-m", f"{__package__}.serving", self._folder, self._tag, switch, self._home]
        said = self._home / "server.out"
        with open(said, "wb") as output:
            self._server = subprocess.Popen(
                [str(part) for part in argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + MOUNT_S
        while not any(mount.source == self._tag for mount in mounts()):
            if self._server.poll() is not None or time.monotonic() > end:
                lines = said.read_text(errors="replace").strip().splitlines()
                why = lines[-1] if lines else "no reason was given"
                raise ChaosError(f"{self._folder} can't be recorded: FUSE could not cover it: {why}")
            time.sleep(0.005)

    def _heal(self, reaper: Reaper) -> None:
        try:
            self.left += [str(healed.reason) for healed in reaper.heal("recorder") if not healed.verified]
        except UndoError as error:
            self.left.append(str(error))

    def _stop_server(self) -> None:
        """Waits for the server's last line. The server ends when the folder is unmounted and no file is open."""
        if self._server is None:
            return
        written = self._written()
        try:
            code = self._server.wait(_END_S)
        except subprocess.TimeoutExpired:
            busy = self._written() > written
            code = self._end_server()
            if busy:
                self._failed = "a process that outlived the job still had a file of it open"
                return
        self._failed = f"the server ended before, with exit code {code}" if code else ""

    def _written(self) -> int:
        """The size of the server's file of operations, in bytes."""
        path = self._home / "operations"
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


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []


def _events(plans: Path) -> list[Event]:
    """The events of the runs with these agent plans."""
    try:
        agents = [AgentPlan.read(line) for line in plans.read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [event for agent in agents for event in read_events(Path(agent.events))]
