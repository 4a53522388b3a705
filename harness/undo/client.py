"""What the harness uses: guard before a fault is applied, heal afterwards.

with Reaper.start(run_dir, run_id) as reaper:
    reaper.guard("freeze-1", [Process.of(pid, "resume")], owner="freeze-1", limit_s=90.0)
    ...
    healed = reaper.heal("freeze-1")
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

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID
from torchaos.harness.contracts import ChaosError, Handle, Irreversible, UsageError
from torchaos.harness.undo import log, open_runs
from torchaos.harness.undo.handles import to_json
from torchaos.harness.undo.healer import BOUND_S, Healed, Healer

ANSWER_S = 30.0  # an fsync on a busy disk may take seconds; a reaper that says nothing for longer is given up


class UndoError(ChaosError):
    """What a fault changes is not guarded, so it must not be applied; or what was guarded can't be healed."""


class Busy(UndoError):
    """Somebody else is healing that run, or guards it: also a reaper that can't be seen from this container."""


class _Lost(UndoError):
    """The reaper is gone."""


class Reaper:
    """The harness's end. Thread-safe: one thread per fault uses it.

    When the reaper itself dies, `guard` and `mark` raise UndoError from then on, and healing is done in this process,
    from the log.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, run_dir: Path, run_id: str) -> None:
        self._process, self._sock, self._run_dir, self._run_id = process, sock, run_dir, run_id
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost = ""  # why, once it is
        self._closed = False
        self._guarded: dict[str, log.UndoRecord] = {}
        self._armed: Future[Any] = Future()
        threading.Thread(target=self._listen, name="reaper", daemon=True).start()

    @classmethod
    def start(cls, run_dir: Path, run_id: str) -> Reaper:
        """Returns once the undo log is open and the reaper listens. Raises UndoError where that can't be had."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        run_dir = run_dir.resolve()  # the reaper lives in /
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
                log.path_of(run_dir).parent.mkdir(mode=0o700, exist_ok=True)
                with open(log.path_of(run_dir).with_name("reaper.log"), "ab", opener=_private) as output:
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
            reaper._armed.result(ANSWER_S)
        except (UndoError, FutureTimeout) as error:
            why = str(error) or f"it did not start within {ANSWER_S:.0f} s"
            reaper._abandon(why)
            open_runs.settle(run_id, run_dir)  # it may have died with its entry made
            raise UndoError(f"{run_dir}: the reaper is not armed: {why}; see undo/reaper.log there") from error
        return reaper

    @property
    def pid(self) -> int:
        return self._process.pid

    def guard(
        self, record: str, handles: Sequence[Handle] | Irreversible, owner: str, limit_s: float | None = None
    ) -> None:
        """When this returns, the way back is on disk and the reaper will take it, at the latest `limit_s` seconds from
        now. Raises UndoError where it is not (then nothing may be injected), UsageError for a call without sense."""
        irreversible = handles.why if isinstance(handles, Irreversible) else None
        if not (handles if irreversible is None else irreversible):
            raise UsageError(f"{record}: it says neither what it changes nor why that can't be undone")
        try:
            raw = [] if isinstance(handles, Irreversible) else [to_json(handle) for handle in handles]
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{record}: what it changes is no handle: {error}") from error
        guarded = log.UndoRecord(record, owner, raw, irreversible, limit_s)
        self._ask(ANSWER_S, do="guard", record=guarded.to_line())
        with self._lock:
            self._guarded[record] = guarded

    def mark(
        self, record: str, state: Literal["maybe_applied", "applied"], limit_s: float | None = None
    ) -> None:  # fmt: skip
        """Say before (`maybe_applied`) and after (`applied`) a fault is applied; from then on it may last `limit_s`
        seconds, where that is less than what is left of the time limit that it was guarded with. Raises UndoError when
        that can't be written, or when the record has been healed already: before, don't apply; after, it is being
        healed again."""
        self._ask(ANSWER_S, do="mark", record=record, state=state, limit_s=limit_s)

    def check(self) -> None:
        """Raises UndoError when the reaper is gone: what was guarded is on disk, but nobody would act on it."""
        if self._lost:
            raise _Lost(f"the reaper is gone ({self._lost}); nothing more may be injected")

    def heal(self, name: str) -> list[Healed]:
        """Take back all that an owner, or one record, has open, the last first. Says what became of each handle that
        was not told before. Raises UndoError where nothing at all can be done."""
        return self._heal(name, "heal")

    def heal_all(self) -> list[Healed]:
        return self._heal(None, "heal")

    def close(self) -> list[Healed]:
        """Heal what is left; the reaper has exited when this returns."""
        if self._closed:
            return []
        self._closed = True
        try:
            return self._heal(None, "end")
        finally:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ANSWER_S)
            self._abandon("it was closed")
            open_runs.settle(self._run_id, self._run_dir)  # a reaper that died could not

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _heal(self, name: str | None, do: str) -> list[Healed]:
        with self._lock:
            mine = [record for record in self._guarded.values() if name in (None, record.id, record.owner)]
            everything = sum(len(record.handles) + 1 for record in self._guarded.values())
        try:
            # The bound is that of the reaper's own bounds, with another's heal before this one.
            healed = [Healed(**raw) for raw in self._ask(ANSWER_S + 3 * BOUND_S * everything, do=do, name=name)]
        except _Lost:
            return self._heal_here(name)
        with self._lock:
            for record in mine:
                if all(each.verified for each in healed if each.record == record.id):
                    self._guarded.pop(record.id, None)
        return healed

    def _heal_here(self, name: str | None) -> list[Healed]:
        if log.path_of(self._run_dir).exists():
            return heal_from_log(self._run_dir, name)
        with self._lock:  # the run directory is gone, log and all
            return Healer(None, self._guarded.values()).heal(name, "the reaper died")

    def _ask(self, timeout_s: float, **request: Any) -> Any:
        answer: Future[Any] = Future()
        try:
            with self._lock:
                self.check()
                id_ = next(self._ids)
                self._waiting[id_] = answer
                self._sock.sendall(json.dumps({"id": id_, **request}).encode() + b"\n")
            return answer.result(timeout_s)
        except FutureTimeout:  # before OSError, which it is a kind of from Python 3.11 on
            self._abandon(f"it did not answer for {timeout_s:.0f} s")
        except OSError as error:
            self._abandon(f"it takes no request: {error.strerror}")
        raise _Lost(f"the reaper is gone ({self._lost}); nothing more may be injected")

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._sock.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(message["id"], None) if "id" in message else self._armed
                if future and "error" in message:
                    future.set_exception(UndoError(message["error"]))
                elif future:
                    future.set_result(message.get("ok"))
        self._give_up("it died")

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._lost = self._lost or why
            waiting, self._waiting = [*self._waiting.values(), self._armed], {}
        for future in waiting:
            if not future.done():
                future.set_exception(_Lost(f"the reaper is gone ({why})"))

    def _abandon(self, why: str) -> None:
        """Make sure that it is gone, so that two never heal at once. It is our own child and not yet waited for, so the
        pid is its own."""
        self._give_up(why)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ANSWER_S)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def heal_from_log(run_dir: Path, name: str | None = None) -> list[Healed]:
    """Heal what a dead reaper left: of an owner or a record, or (None) everything.

    A run without a log had nothing guarded. Raises UndoError where the log can't be read, or is another user's; Busy
    where another process is healing the run.
    """
    writer = None
    try:
        with suppress(FileNotFoundError):
            writer = _writer(run_dir)
            records, damaged = log.read(run_dir)
            within = {run_dir.resolve(), *log.folder_of(run_dir)}
            healed = Healer(writer, records, within).heal(name, "from the log")
            return healed + [
                Healed("?", {}, False, f"line {number} of {log.path_of(run_dir)} can't be read") for number in damaged
            ]
    except BlockingIOError as error:
        raise Busy(f"{run_dir}: {error}") from error
    except OSError as error:
        raise UndoError(f"{log.path_of(run_dir)}: nothing can be healed from it: {error.strerror or error}") from error
    finally:
        if writer:
            writer.close()
    return []


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _writer(run_dir: Path) -> log.UndoLog | None:
    """None on a disk that can't be written: what is healed is then not noted, and healed again the next time."""
    try:
        return log.UndoLog(run_dir, wait_s=5.0, create=False)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            return None
        raise
