"""The reaper: a process in its own session, which outlives the harness and undoes the changes of the run.

    python -m torchaos.harness.rollback.reaper FD RUN_DIR RUN_ID HARNESS_PID

FD is one end of a socket pair; the harness holds the other. Both send JSON objects, one per line. The reaper first
sends {"armed": pid}. Requests carry an `id`, which the answer repeats together with `ok` or `error`:

    {"do": "record_undo", "record": a planned line of the undo log}  writes an undo record; ok when it is on disk
    {"do": "mark", "record", "state", "limit_s": seconds that are left from now on, or null}
    {"do": "undo", "name": record or owner or null}                  undoes these records; ok: a list of UndoResult
    {"do": "end"}                           undoes everything that is left; the reaper then exits

The reaper also undoes a record when its time limit is over, and everything when the harness is gone. It imports only
the standard library, `wire` and its own package, because every run waits until it has started."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.undo_executor import UndoExecutor, UndoResult
from torchaos.harness.rollback.undo_log import OpenRun, State, UndoLog, UndoRecord

FORKS_S = 1.0  # seconds for a process that the harness forked just before its death to call exec


class Reaper:
    """The reaper's main loop. The main thread accepts requests and watches the time limits. Each undo has a thread of
    its own, so that a slow undo delays neither of them."""

    def __init__(self, sock: socket.socket, executor: UndoExecutor, harness: int) -> None:
        self._sock, self._executor = sock, executor
        self._pidfd: int | None = None  # None: the harness has died already
        with suppress(ProcessLookupError):  # before the harness learns that the reaper is ready
            self._pidfd = os.pidfd_open(harness)
        self._parent_image = processes.image(harness)
        self._sending = threading.Lock()
        self._deadlines: dict[str, float] = {}  # by record, in seconds of CLOCK_MONOTONIC
        self._unread = b""

    def run(self) -> None:
        """Serves requests until the harness has sent `end` or is gone, and everything is undone."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        # The end of the connection does not show every death of the harness: a process that the harness has forked, and
        # that has not called exec, keeps the socket open.
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        while self._pidfd is not None:
            ready = {fd for fd, _events in poll.poll(self._until_next_ms())}
            self._undo_overdue()
            if self._sock.fileno() in ready:
                lines = self._receive()
                if lines is None:
                    break
                for line in lines:
                    if self._answer(json.loads(line)):
                        return
            elif ready:
                break
        if self._parent_image:
            processes.wait_for_forks(self._parent_image, FORKS_S)
        self._executor.carry_out(None, "the harness is gone")

    def send(self, answer: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):  # the harness may be dead by now
            self._sock.sendall(json.dumps(answer).encode() + b"\n")

    def _until_next_ms(self) -> float | None:
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - time.monotonic()) * 1000 + 1

    def _undo_overdue(self) -> None:
        for record, deadline in list(self._deadlines.items()):
            if deadline <= time.monotonic():
                del self._deadlines[record]
                _in_background(self._executor.carry_out, record, "its time limit was over")

    def _receive(self) -> list[bytes] | None:
        """The complete lines that have arrived. None at the end of the connection."""
        try:
            data = self._sock.recv(1 << 20)
        except ConnectionResetError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return lines if data else None

    def _answer(self, request: dict[str, Any]) -> bool:
        """Carries out a request and answers it. Returns True if it was the last request."""
        id_, do = request.get("id"), request.get("do")
        try:
            if do == "record_undo":
                self._record_undo(UndoRecord.from_line(request["record"]))
                self.send({"id": id_, "ok": True})
            elif do == "mark":
                self._mark(request["record"], State(request["state"]), request.get("limit_s"))
                self.send({"id": id_, "ok": True})
            elif do == "undo":
                _in_background(self._undo, id_, request["name"])
            elif do == "end":
                self._undo(id_, None)
                return True
            else:
                raise ValueError(f"{do!r} is no request")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.send({"id": id_, "error": str(error)})
        return False

    def _record_undo(self, record: UndoRecord) -> None:
        self._executor.record_undo(record)
        self._deadlines.pop(record.id, None)
        if record.limit_s is not None and record.irreversible is None:
            self._deadlines[record.id] = time.monotonic() + record.limit_s

    def _mark(self, name: str, state: State, limit_s: float | None) -> None:
        if self._executor.mark(name, state):
            if limit_s is not None and name in self._deadlines:
                self._deadlines[name] = min(self._deadlines[name], time.monotonic() + limit_s)
            return
        if state is State.APPLIED:
            _in_background(self._executor.carry_out, name, "it was applied after it had been undone")
        raise ValueError(f"{name} has been undone already, at its time limit or on request")

    def _undo(self, id_: object, name: str | None) -> None:
        results: list[UndoResult] = self._executor.undo(name, "on request")
        self.send({"id": id_, "ok": [asdict(each) for each in results]})


def _in_background(work: Any, *args: object) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def main(fd: int, run_dir: Path, run_id: str, harness: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    try:
        log = UndoLog(run_dir)
        run = OpenRun.of(run_id, run_dir, (harness, processes.ticks_of(harness)))
        log.header(asdict(run))
        if (place := undo_log.add(run)) is not None:
            log.keep_copy(place)
    except OSError as error:
        sock.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    executor = UndoExecutor(log)
    reaper = Reaper(sock, executor, harness)
    reaper.send({"armed": os.getpid()})
    reaper.run()
    if executor.is_done:
        undo_log.remove(run_id)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    sys.stderr.flush()
    os._exit(0)  # exit at once, even if an undo hangs in a thread
