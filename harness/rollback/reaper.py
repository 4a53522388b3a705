"""The reaper: a process in its own session, which outlives the harness and undoes the changes of the run.

    python -m torchaos.harness.rollback.reaper FD RUN_DIR RUN_ID HARNESS_PID

FD is one end of a socket pair; the harness holds the other. Both send JSON objects, one per line. The reaper first
sends {"ready": pid}. Requests carry an `id`, which the answer repeats together with `ok` or `error`:

    {"do": "record_undo", "record": a planned line of the undo log}  writes an undo record; ok when it is on disk
    {"do": "mark", "record", "state", "limit_s": seconds that are left from now on, or null}
    {"do": "undo", "name": record or owner or null}                  undoes these records; ok: a list of UndoResult
    {"do": "end"}                           undoes everything that is left; the reaper then exits

The reaper also undoes a record when its time limit is over, and everything when the harness is gone. It and all
that it imports need only the standard library, because every run waits until it has started."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, TypeVar

from torchaos.harness.host import processes
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.handles import check_within, from_json
from torchaos.harness.rollback.undo_log import OpenRun, State, UndoLog, UndoRecord

if TYPE_CHECKING:
    from torchaos.harness.interfaces import Handle


BOUND_S = 45.0  # seconds for one undo, one verification, or one line of the log; more than the limit of any handle

Result = TypeVar("Result")


@dataclass(frozen=True)
class UndoResult:
    record: str
    handle: Mapping[str, Any]  # the handle as JSON
    verified: bool
    reason: str = ""  # why the undo is not verified


class UndoExecutor:
    """Holds the undo records, and undoes them, the last written first. Each handle is undone, then verified.
    Thread-safe. Records are undone one at a time; new records and marks are accepted meanwhile. An undo that hangs is
    given up after `BOUND_S` seconds.

    `log`: None if nothing is written to a log. `within`: the folders of the run, if the records come from a log, which
    somebody else may have written. Then a handle is not undone if its files must be in these folders and are not."""

    def __init__(
        self, log: UndoLog | None, records: Iterable[UndoRecord] = (), within: Collection[Path] | None = None
    ) -> None:  # fmt: skip
        self._log, self._within = log, within
        self._records = {record.id: record for record in records}
        self._working = threading.Lock()
        self._state = threading.Lock()
        self._undone: set[str] = set()
        self._again: set[str] = set()  # records whose change was made again after its undo
        self._unreported: dict[str, list[UndoResult]] = {}

    def record_undo(self, record: UndoRecord) -> None:
        """Writes an undo record. It is on disk when this returns. Raises ValueError for a bad record, OSError if it
        can't be written."""
        if record.id in self._records and self._records[record.id].open:
            raise ValueError(f"{record.id} has its undo in the log already")
        for handle in record.handles:
            from_json(handle)
        if self._log is not None:
            self._log.append(record.to_line())
        with self._state:
            self._records.pop(record.id, None)
            self._records[record.id] = record
            self._undone.discard(record.id)

    def mark(self, name: str, state: State) -> bool:
        """Records that a change is about to be made, or was made. Returns False if the record was undone before; the
        next `undo` then undoes the change, in case it was made after that. Raises ValueError for an unknown record,
        OSError if nothing can be written."""
        if name not in self._records:
            raise ValueError(f"{name} has no undo in the log")
        if state not in (State.MAYBE_APPLIED, State.APPLIED):
            raise ValueError(f"only the undo writes {state.value}")
        with self._state:
            late = name in self._undone
            if late and state is State.APPLIED:
                self._again.add(name)
            if not (late and state is State.MAYBE_APPLIED):
                self._append(self._records[name], state, "")
        return not late

    def undo(self, name: str | None, why: str) -> list[UndoResult]:
        """Undoes the open records with this name or owner; None: all. Returns the result of each handle that was not
        reported before, including those that were undone at a time limit."""
        self.carry_out(name, why)
        ids = [record.id for record in self._chosen(name)]
        return [result for id_ in ids for result in self._unreported.pop(id_, [])]

    def carry_out(self, name: str | None, why: str) -> None:
        """Undoes the same records as `undo`, but keeps the results for the next call of `undo`."""
        with self._working:
            for record in self._with_later_faults(self._chosen(name)):
                if record.open or record.id in self._again:
                    self._unreported[record.id] = self._undo(record, why)

    @property
    def is_done(self) -> bool:
        with self._state:
            return not self._again and not any(record.open for record in self._records.values())

    def _chosen(self, name: str | None) -> list[UndoRecord]:
        with self._state:
            return [record for record in reversed(self._records.values()) if name in (None, record.id, record.owner)]

    def _with_later_faults(self, chosen: list[UndoRecord]) -> list[UndoRecord]:
        """The chosen records, and the records of later faults on the same files, which must be undone before them."""
        ids = {record.id for record in chosen}
        paths = {path for record in chosen for path in _paths(record)}
        with self._state:
            later = list(self._records.values())
            if paths and chosen:
                later = later[later.index(chosen[-1]) :]
                ids |= {record.id for record in later if record.open and paths & _paths(record)}
            return [record for record in reversed(self._records.values()) if record.id in ids]

    def _undo(self, record: UndoRecord, why: str) -> list[UndoResult]:
        with self._state:
            self._undone.add(record.id)
            self._again.discard(record.id)
        handles = list(reversed(record.handles))
        problems = [_problem(partial(_undo_handle, raw, self._within)) for raw in handles]
        if not any(problems):
            self._note(record, State.ROLLED_BACK, why)
        outcomes = zip(handles, problems, strict=True)
        results = [_verify(record.id, raw, problem, self._within) for raw, problem in outcomes]
        reasons = "; ".join(each.reason for each in results if not each.verified)
        self._note(record, State.FAILED if reasons else State.VERIFIED, reasons or why)
        return results

    def _note(self, record: UndoRecord, state: State, why: str) -> None:
        """Writes a state to the log. If that fails, the undo goes on. The next process that undoes the run then repeats
        it, which does no harm."""
        if problem := _problem(lambda: self._append(record, state, why)):
            with suppress(OSError):  # stderr may be on the disk that is full
                text = f"undo.jsonl: {record.id} {state.value} could not be written: {problem}"
                print(text, file=sys.stderr, flush=True)
            record.state = state

    def _append(self, record: UndoRecord, state: State, why: str) -> None:
        if self._log is not None:
            self._log.append({"record": record.id, "state": state.value, "why": why})
        record.state = state


def _paths(record: UndoRecord) -> set[str]:
    return {str(raw["path"]) for raw in record.handles if raw.get("kind") == "file" and "path" in raw}


def _undo_handle(raw: Mapping[str, Any], within: Collection[Path] | None) -> None:
    _checked(raw, within).undo()


def _checked(raw: Mapping[str, Any], within: Collection[Path] | None) -> Handle:
    handle = from_json(raw)
    if within is not None:
        check_within(handle, within)
    return handle


def _verify(record: str, raw: Mapping[str, Any], problem: str, within: Collection[Path] | None) -> UndoResult:
    answer: list[bool] = []
    unseen = _problem(lambda: answer.append(_checked(raw, within).is_undone()))
    if answer == [True]:
        return UndoResult(record, raw, True)
    return UndoResult(
        record, raw, False, problem or unseen or "the state after the undo is not the state before the change"
    )


def _problem(work: Callable[[], object]) -> str:
    """Does the work, for at most `BOUND_S` seconds. Returns what went wrong, or an empty text."""
    problems: list[str] = []

    def run() -> None:
        try:
            work()
            problems.append("")
        except Exception as error:  # whatever a handle raises, the next handles must be undone
            problems.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    return problems[0] if problems else f"it hung for {BOUND_S:.0f} s"


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
    reaper.send({"ready": os.getpid()})
    reaper.run()
    if executor.is_done:
        undo_log.remove(run_id)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    sys.stderr.flush()
    os._exit(0)  # exit at once, even if an undo hangs in a thread
