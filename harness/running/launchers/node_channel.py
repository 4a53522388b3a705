"""The connection between the controller, which is the process of `torchaos run`, and the agent of one node: its words,
and the controller's end."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchaos.harness.agent.wire import Event
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.record.events.node_clocks import on_node
from torchaos.harness.record.events.payloads import read
from torchaos.harness.running.launchers.node_run_dir import append

# The words between the controller, which is the process of `torchaos run`, and the agent of a node: JSON objects, one
# on each line.
#
# The controller says              and the agent answers
#     hello {version, collect}         {hello: {version, node, host, boot, pids, missing, lapsed, mono_s}}, or {error}
#     beat {sent_s}                    {beat, mono_s}; it must come every few seconds, see LEASE_S
#     clock {offset_s, error_s}        nothing; the agent records it as the offset of its clock
#     follow {since}                   {event, n} for each event of the node from number `since` on
#     start {fault, ranks}             nothing; the fault is carried out, with its trigger in a rank or (without) now
#     page {fault, rank, word, value}  nothing; the words of control pages that come from elsewhere
#     signal {number}                  nothing; the node's command gets the signal
#     end {id}                         {re, ok: faults that have not ended}; no fault begins any more
#     heal {id, fault}                 {re, ok: []}; the fault is taken back (null: all are), and the journal says how
#     leave                            {bye: {}}; the agent takes everything back and does not wait for the lease
#
# {file, bytes} comes after the job's end for each piece of a file that the node wrote, if the controller said
# `collect`. {lapsed: why} comes at the end of the lease, and {bye: {}} as the last line of an agent whose command has
# ended. Whoever may write to the agent is decided by the agent's socket: it has mode 0700 in a folder of its user, and
# the kernel names the user at the other end.

VERSION = 1
LEASE_S = 10.0  # seconds without a message of the controller, after which the agent undoes everything
BEAT_S = 1.0


def mark_of(run_id: str, node: int, submission: int) -> str:
    """The name of a node's part of a run. It marks the processes there, and is the name of the folder on the node."""
    return f"{run_id}.node{node}" + (f".{submission}" if submission else "")


# The controller's end of the connection to the agent of one node. The controller is the process of `torchaos run`.

_EXCHANGES = 8  # exchanges for the first measurement of the clocks
_CLOCK_S = 60.0  # seconds after which the clocks are measured anew: they drift by some ms in that time
_AGAIN_S = 0.3
_ANSWER_S = 60.0


class NoAnswer(ChaosError):
    """The agent of a node does not answer."""


@dataclass
class Handler:
    """The functions that a line calls for its messages. Each is called in a thread of the line."""

    up: Callable[[int, Mapping[str, Any]], None]  # the agent of this node has connected, maybe again; its hello
    take: Callable[[list[Event]], None]  # events of the node, with the times of our clock and pids unique in the job
    lost: Callable[[int, str], None]  # the agent has ended without a message, or can't be reached any more
    lapsed: Callable[[int, str], None]  # the agent has undone everything by itself


@dataclass
class Line:
    """A connection to the agent of `node`. `argv`: the command that connects; it is started again when it ends, for
    `patience_s` seconds. `keep`: the run directory, in which the node's part of the record is written if the node does
    not see the directory itself."""

    node: int
    argv: Sequence[str]
    on: Handler
    keep: Path | None = None
    patience_s: float = 120.0
    left: threading.Event = field(default_factory=threading.Event)  # the agent has sent its last message, or is lost
    connected: bool = False  # the agent has said something over the present pipe, which may bring more
    _ended: threading.Event = field(default_factory=threading.Event)
    _process: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)
    _waiting: dict[int, Future[Any]] = field(default_factory=dict)
    _asked: int = 0
    _heard: int = 0  # events that were received
    _since_s: float = 0.0  # when the agent last sent something
    _clock: list[tuple[float, float]] = field(default_factory=list)  # exchanges: bound of the error, offset (s)
    _offset_s: float = 0.0
    _measured_s: float = 0.0
    _hello: Mapping[str, Any] | None = None  # the agent's hello, until the clocks are measured

    def start(self) -> None:
        self._since_s = time.monotonic()
        for work in (self._live, self._beat):
            threading.Thread(target=work, name=f"node {self.node}", daemon=True).start()

    def tell(self, do: str, **words: Any) -> None:
        """Sends a message that has no answer. It is lost if the pipe is broken."""
        with self._lock, suppress(OSError, ValueError):
            if self._process and self._process.stdin:
                self._process.stdin.write(json.dumps({"do": do, **words}).encode() + b"\n")
                self._process.stdin.flush()

    def ask(self, do: str, timeout_s: float = _ANSWER_S, **words: Any) -> Any:
        """Sends a message, and returns the agent's answer. Raises NoAnswer."""
        answer: Future[Any] = Future()
        with self._lock:
            self._asked += 1
            number = self._asked
            self._waiting[number] = answer
        self.tell(do, id=number, **words)
        end = time.monotonic() + timeout_s
        while not self.left.is_set() and time.monotonic() < end:
            with suppress(FutureTimeout):
                return answer.result(0.1)
        raise NoAnswer(f"the agent of node {self.node} does not answer")

    @property
    def alive(self) -> bool:
        """Whether the agent has answered within the lease."""
        return self.connected and time.monotonic() < self._since_s + LEASE_S

    def close(self) -> None:
        """Closes the connection. The agent, if it is alive, undoes everything."""
        self._closed.set()
        self.tell("leave")
        self.left.set()
        self._hang_up()

    def await_end(self, timeout_s: float) -> None:
        """Waits until everything that follows from the loss of the agent is done."""
        self._ended.wait(timeout_s)

    def _hang_up(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _live(self) -> None:
        try:
            self._connect()
        finally:
            self._ended.set()

    def _connect(self) -> None:
        while not self._closed.is_set():
            why = self._talk()
            self.connected = False
            self._hang_up()
            if self.left.is_set() or self._closed.is_set():
                return
            if why or time.monotonic() - self._since_s > self.patience_s:
                self.left.set()
                self.on.lost(self.node, why or f"it could not be reached for {self.patience_s:g} s")
                return
            self._closed.wait(_AGAIN_S)

    def _talk(self) -> str:
        """Runs the command that connects, until it ends. Returns why no other try makes sense, or an empty text."""
        try:
            process = self._process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{self.argv[0]}: {error.strerror}"
        assert process.stdout is not None
        self.tell("hello", version=VERSION, collect=self.keep is not None)
        for line in process.stdout:
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(line)
                if "error" in said:
                    return str(said["error"])
                try:
                    self._take(said)
                except OSError as error:  # of the disk here
                    return f"its part of the record can't be kept: {error}"
        # Exit code 6 of the command: no agent listens, although there was an agent before.
        return "its agent has died" if process.wait() == 6 and self._measured_s else ""

    def _take(self, said: Mapping[str, Any]) -> None:
        self._since_s, self.connected = time.monotonic(), True
        if "hello" in said:
            self._clock.clear()
            for _ in range(_EXCHANGES):
                self.tell("beat", sent_s=time.monotonic())
            self._hello = said["hello"]
        elif "beat" in said:
            self._note_clock(float(said["beat"]), float(said["mono_s"]), time.monotonic())
        elif "event" in said:
            event = read(said["event"])
            self._heard = int(said["n"]) + 1
            if self.keep is not None:
                append(self.keep, f"events/sent-by-node{self.node}.jsonl", said["event"].encode() + b"\n")
            self.on.take([on_node(replace(event, mono_s=event.mono_s + self._offset_s), self.node)])
        elif "file" in said and self.keep is not None:
            append(self.keep, str(said["file"]), base64.b64decode(said["bytes"]))
        elif "re" in said:
            answer = self._waiting.pop(said["re"], None)
            if answer is not None:
                answer.set_result(said["ok"])
        elif "lapsed" in said:
            self.on.lapsed(self.node, said["lapsed"])
        elif "bye" in said:
            self.left.set()

    def _note_clock(self, sent_s: float, mono_s: float, heard_s: float) -> None:
        """Adds one exchange of clock readings, as in NTP (RFC 5905, section 8): the error is at most half of the round
        trip."""
        self._clock.append(((heard_s - sent_s) / 2, (sent_s + heard_s) / 2 - mono_s))
        if len(self._clock) < _EXCHANGES or (self._hello is None and heard_s - self._measured_s < _CLOCK_S):
            return
        error_s, self._offset_s = min(self._clock)
        self._clock, self._measured_s = [], heard_s
        self.tell("clock", offset_s=self._offset_s, error_s=error_s)
        if self._hello is not None:
            hello, self._hello = self._hello, None
            self.on.up(self.node, hello)
            self.tell("follow", since=self._heard)

    def _beat(self) -> None:
        while not self.left.wait(BEAT_S) and not self._closed.is_set():
            self.tell("beat", sent_s=time.monotonic())
