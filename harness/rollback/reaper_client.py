"""The harness's connection to the reaper, which writes undos to disk before faults are applied, and carries them out.

with ReaperClient.start(run_dir, run_id) as reaper:
    reaper.record_undo("freeze-1", [Process.of(pid, "resume")], owner="freeze-1", limit_s=90.0)
    ...
    results = reaper.undo("freeze-1")
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Sequence

from torchaos.harness.host.disk import owner_only
from torchaos.harness.interfaces import ChaosError, Handle, Irreversible, UsageError
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.handles import to_json
from torchaos.harness.rollback.reaper import BOUND_S, UndoExecutor, UndoResult

ANSWER_S = 30.0  # seconds to wait for an answer, which may need an fsync on a busy disk


class UndoError(ChaosError):
    """The undo of a change can't be written to disk, so the fault must not be applied; or a change can't be undone."""


class Busy(UndoError):
    """Another process is writing the undo log of this run. It may be a reaper that can't be seen from this
    container."""


class _Lost(UndoError):
    """The reaper is gone."""


class ReaperClient:
    """The harness's end of the connection to the reaper. Thread-safe: each fault uses it from its own thread.

    If the reaper dies, `record_undo` and `mark` raise UndoError from then on, and `undo` undoes the changes in this
    process, from the log."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, run_dir: Path, run_id: str) -> None:
        self._process, self._sock, self._run_dir, self._run_id = process, sock, run_dir, run_id
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost = ""  # why the reaper is lost; empty: it lives
        self._closed = False
        self._records: dict[str, undo_log.UndoRecord] = {}
        self._ready: Future[Any] = Future()
        threading.Thread(target=self._listen, name="reaper", daemon=True).start()

    @classmethod
    def start(cls, run_dir: Path, run_id: str) -> ReaperClient:
        """Starts the reaper. Returns when the undo log is open and the reaper listens. Raises UndoError if that
        fails."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        run_dir = run_dir.resolve()  # the reaper's working directory is /
        env = {
            name: value for name, value in os.environ.items() if name not in (ENV_PLAN, ENV_RUN_ID, ENV_ATTEMPT_BASE)
        }
        argv = [
            sys.executable,
            "-m",
            f"{__package__}.reaper",
            str(theirs.fileno()),
            str(run_dir),
            run_id,
            str(os.getpid()),
        ]
        try:
            with theirs:
                undo_log.path_of(run_dir).parent.mkdir(mode=0o700, exist_ok=True)
                with open(undo_log.path_of(run_dir).with_name("reaper.log"), "ab", opener=owner_only) as output:
                    process = subprocess.Popen(
                        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", env=env,
                        pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
        except OSError as error:
            ours.close()
            raise UndoError(
                f"{run_dir}: the reaper can't be started: {error.strerror}; nothing will be injected"
            ) from error
        reaper = cls(process, ours, run_dir, run_id)
        try:
            reaper._ready.result(ANSWER_S)
        except (UndoError, FutureTimeout) as error:
            why = str(error) or f"it did not start within {ANSWER_S:.0f} s"
            reaper._abandon(why)
            undo_log.settle(run_id, run_dir)  # the reaper may have died after it made its entry
            raise UndoError(f"{run_dir}: the reaper is not ready: {why}; see undo/reaper.log there") from error
        return reaper

    @property
    def pid(self) -> int:
        return self._process.pid

    def record_undo(
        self, record: str, handles: Sequence[Handle] | Irreversible, owner: str, limit_s: float | None = None
    ) -> None:
        """Writes the undo record `record`. Returns when the handles are on disk. The reaper undoes them after `limit_s`
        seconds, if nobody did before. Raises UndoError if they can't be written (then inject nothing), and UsageError
        if there are no handles."""
        irreversible = handles.why if isinstance(handles, Irreversible) else None
        if not (handles if irreversible is None else irreversible):
            raise UsageError(f"{record}: it lists no changes, and gives no reason why they can't be undone")
        try:
            raw = [] if isinstance(handles, Irreversible) else [to_json(handle) for handle in handles]
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{record}: changes() must return handles: {error}") from error
        written = undo_log.UndoRecord(record, owner, raw, irreversible, limit_s)
        self._ask(ANSWER_S, do="record_undo", record=written.to_line())
        with self._lock:
            self._records[record] = written

    def mark(
        self, record: str, state: Literal["maybe_applied", "applied"], limit_s: float | None = None
    ) -> None:  # fmt: skip
        """Records that a change is about to be made (`maybe_applied`) or was made (`applied`). From then on it may last
        at most `limit_s` seconds, and no longer than the limit that `record_undo` set. Raises UndoError if that can't
        be written, or if the record was undone before. After an error with `maybe_applied`, don't apply the fault.
        After an error with `applied`, the fault is being undone."""
        self._ask(ANSWER_S, do="mark", record=record, state=state, limit_s=limit_s)

    def check(self) -> None:
        """Raises UndoError if the reaper is gone: no process would undo the changes by itself, although their undo is
        on disk."""
        if self._lost:
            raise _Lost(f"the reaper is gone ({self._lost}); nothing more may be injected")

    def undo(self, name: str | None) -> list[UndoResult]:
        """Undoes all open records with this owner or name (None: all), the last written first. Returns the result of
        each handle that was not reported before. Raises UndoError if nothing can be undone at all."""
        return self._undo(name, "undo")

    def close(self) -> list[UndoResult]:
        """Undoes everything that is left, as `undo` does. The reaper has exited when this returns."""
        if self._closed:
            return []
        self._closed = True
        try:
            return self._undo(None, "end")
        finally:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ANSWER_S)
            self._abandon("it was closed")
            undo_log.settle(self._run_id, self._run_dir)  # a reaper that died could not remove its entry

    def __enter__(self) -> ReaperClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _undo(self, name: str | None, do: str) -> list[UndoResult]:
        with self._lock:
            mine = [record for record in self._records.values() if name in (None, record.id, record.owner)]
            everything = sum(len(record.handles) + 1 for record in self._records.values())
        try:
            # The reaper has its own time limits, and may have to finish an earlier undo first.
            results = [UndoResult(**raw) for raw in self._ask(ANSWER_S + 3 * BOUND_S * everything, do=do, name=name)]
        except _Lost:
            return self._undo_here(name)
        with self._lock:
            for record in mine:
                if all(each.verified for each in results if each.record == record.id):
                    self._records.pop(record.id, None)
        return results

    def _undo_here(self, name: str | None) -> list[UndoResult]:
        if undo_log.path_of(self._run_dir).exists():
            return undo_from_log(self._run_dir, name)
        with self._lock:  # the run directory is gone, with the log
            return UndoExecutor(None, self._records.values()).undo(name, "the reaper died")

    def _ask(self, timeout_s: float, **request: Any) -> Any:
        answer: Future[Any] = Future()
        try:
            with self._lock:
                self.check()
                id_ = next(self._ids)
                self._waiting[id_] = answer
                self._sock.sendall(json.dumps({"id": id_, **request}).encode() + b"\n")
            return answer.result(timeout_s)
        except FutureTimeout:  # before OSError, of which it is a subclass from Python 3.11 on
            self._abandon(f"it did not answer for {timeout_s:.0f} s")
        except OSError as error:
            self._abandon(f"it takes no request: {error.strerror}")
        raise _Lost(f"the reaper is gone ({self._lost}); nothing more may be injected")

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._sock.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(message["id"], None) if "id" in message else self._ready
                if future and "error" in message:
                    future.set_exception(UndoError(message["error"]))
                elif future:
                    future.set_result(message.get("ok"))
        self._give_up("it died")

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._lost = self._lost or why
            waiting, self._waiting = [*self._waiting.values(), self._ready], {}
        for future in waiting:
            if not future.done():
                future.set_exception(_Lost(f"the reaper is gone ({why})"))

    def _abandon(self, why: str) -> None:
        """Kills the reaper, so that never two processes undo at the same time. The reaper is a child of this process
        that was not waited for yet, so its pid can't belong to another process."""
        self._give_up(why)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ANSWER_S)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def undo_from_log(run_dir: Path, name: str | None = None) -> list[UndoResult]:
    """Undoes the changes that a dead reaper did not undo, and returns a result for each handle. `name`: the name of
    records of the undo log, or their owner; None: all. The list is empty if there is no log, because then nothing was
    changed. Raises UndoError if the log can't be read or belongs to another user, Busy if another process undoes the
    changes of this run."""
    writer = None
    try:
        with suppress(FileNotFoundError):
            writer = _writer(run_dir)
            records, damaged = undo_log.read(run_dir)
            within = {run_dir.resolve(), *undo_log.folder_of(run_dir)}
            results = UndoExecutor(writer, records, within).undo(name, "from the log")
            return results + [
                UndoResult("?", {}, False, f"line {number} of {undo_log.path_of(run_dir)} can't be read")
                for number in damaged
            ]
    except BlockingIOError as error:
        raise Busy(f"{run_dir}: {error}") from error
    except OSError as error:
        raise UndoError(
            f"{undo_log.path_of(run_dir)}: nothing can be undone from it: {error.strerror or error}"
        ) from error
    finally:
        if writer:
            writer.close()
    return []


def _writer(run_dir: Path) -> undo_log.UndoLog | None:
    """The log, opened for writing. None if the disk can't be written to. Then the undo is not recorded, and is repeated
    by the next process that reads the log."""
    try:
        return undo_log.UndoLog(run_dir, wait_s=5.0, create=False)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            return None
        raise
