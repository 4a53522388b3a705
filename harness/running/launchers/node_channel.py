"""The connection between the controller (the process of `torchaos run`) and the agent of one node: the messages, and
the controller's end.

A node may share no folder with the controller. Then the plans are sent to the node through a pipe before the job
starts, and the agent sends back the files that the node wrote when the job has ended.

The messages are JSON objects, one on each line.

The controller says              and the agent answers
    hello {version, collect}         {hello: {version, node, host, boot, pids, missing, lapsed, mono_s}}, or {error}
    beat {sent_s}                    {beat, mono_s}; it must come every few seconds, see LEASE_S
    clock {offset_s, error_s}        nothing; the agent records it as the offset of its clock
    follow {since}                   {event, n} for each event of the node from number `since` on
    start {fault, ranks}             nothing; the fault is armed, or applied at once if its trigger is not in a rank
    page {fault, rank, word, value}  nothing; the agent writes the value into the control page of the rank
    signal {number}                  nothing; the node's command gets the signal
    end {id}                         {re, ok: faults that have not ended}; no fault begins any more
    heal {id, fault}                 {re, ok: []}; the fault is undone (null: all faults); the result is in the journal
    leave                            {bye: {}}; the agent undoes everything and does not wait for the end of the lease

If the controller said `collect`, the agent sends {file, bytes} after the job's end, for each piece of a file that the
node wrote. At the end of the lease it sends {lapsed: why}, and as its last line, when its command has ended, {bye: {}}.
Only the same user and root may write to the agent: its socket has mode 0700 in a folder of its user, and the kernel
tells which user is at the other end."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import IO, Any

from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.events.journal import read
from torchaos.harness.record.events.node_clocks import on_node
from torchaos.harness.record.rundir import RunDir

_SENT = ("agent/manifests", "agent/reads", "agent/stamps", "logs")
_PIECE = 1 << 18
PATIENCE_S = 900.0  # seconds that a node waits for the others, which may still get machines and images


def is_made(folder: RunDir) -> bool:
    """Whether the run directory is complete; the agent's plan is written last. Raises UsageError if the directory, or
    the path to the plan, belongs to another user or is a link: in a shared folder, other users could then choose what
    the ranks read."""
    for path in (folder.root, folder.agent_plan.parent, folder.agent_plan):
        try:
            folder.own(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def packed(root: Path, node: int, hosts: Sequence[str], submission: int = 0, base: int = 0) -> bytes:
    """The data that a node needs, as JSON: its number, the names or addresses of all nodes, the number of attempts
    before this submission, the plans, and the folder of torchaos's injectors on this machine."""
    run = RunDir(root)
    plans = {"plan": run.plan.read_text(), "agent_plan": run.agent_plan.read_text()}
    attempts = {"submission": submission, "base": base}
    return json.dumps({"node": node, "hosts": hosts, "injectors": _injectors(), **attempts, **plans}).encode()


def receive(root: Path, given: IO[bytes]) -> bool:
    """Makes the run directory of this node from the data of `packed`, unless the node sees the run directory of the
    controller. Returns whether it does. Raises UsageError if the directory can't be made, or if this machine lacks an
    injector of the plan."""
    said, run = json.loads(given.read()), RunDir(root)
    shared = is_made(run)
    if not shared:
        run.create(finish=True)
        plan, agent_plan = (_of_this_machine(said[name], said["injectors"]) for name in ("plan", "agent_plan"))
        missing = [fault["source"] for fault in json.loads(plan)["faults"] if not Path(fault["source"]).is_file()]
        if missing:
            raise UsageError(f"{missing[0]}: this injector is not on the node; install its package in the image")
        run.plan.write_text(plan)
        base = base_file(root, said["submission"])
        base.parent.mkdir(mode=0o700)
        base.write_text(str(said["base"]))
        _write(run.agent_plan, agent_plan)
    _write(_place(run, said["submission"]), json.dumps({"node": said["node"], "hosts": said["hosts"]}))
    return shared


def base_file(root: Path, submission: int) -> Path:
    """The file with the number of attempts before a submission."""
    return root / "clock" / f"base-{submission}"


def await_place(root: Path, submission: int, wait_s: float) -> tuple[int, list[str]]:
    """Waits until the controller has given this node its number in a submission. Returns the number, and the names of
    all nodes. Raises UsageError after `wait_s` seconds, or if the node has already taken its number: if somebody starts
    the container again, the job must not start again."""
    place, end = _place(RunDir(root), submission), time.monotonic() + wait_s
    taken = place.with_suffix(".taken")
    while not place.exists():
        if taken.exists():
            raise UsageError(f"{root}: this container was started again; the job's part on this node is over")
        if time.monotonic() > end:
            raise UsageError(f"{root}: the controller did not hand over the run within {wait_s:g} s")
        time.sleep(0.1)
    os.replace(place, taken)
    said = json.loads(taken.read_text())
    return int(said["node"]), list(said["hosts"])


def files_to_send(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files that the node wrote into its run directory, in pieces of at most _PIECE bytes: (path in the run
    directory, next bytes of that file). Events are left out, because they are sent at once."""
    for folder in _SENT:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and not path.is_symlink():
                with open(path, "rb") as file:
                    while piece := file.read(_PIECE):
                        yield str(path.relative_to(root)), piece


def append(root: Path, name: str, piece: bytes) -> None:
    """Appends bytes to a file in the run directory. Raises ValueError if a node may not write a file with that name."""
    path = PurePosixPath(name)
    if ".." in path.parts or not any(path.is_relative_to(folder) for folder in (*_SENT, "events")):
        raise ValueError(f"{name}: a node does not write this file")
    target = root / path
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(target, "ab", opener=lambda at, flags: os.open(at, flags, 0o600)) as file:
        file.write(piece)


def _of_this_machine(plan: str, injectors: str) -> str:
    """The plan, with the folder `injectors` of the controller replaced by the folder on this machine."""
    return plan.replace(json.dumps(injectors)[1:-1], json.dumps(_injectors())[1:-1])


def _place(run: RunDir, submission: int) -> Path:
    """The file with the number of this node. Nodes that share a folder have different files, and so have submissions:
    new pods have the same names as the pods before them, but other addresses."""
    return run.agent_plan.with_name(f"node-{os.uname().nodename}-{submission}.json")


def _write(path: Path, text: str) -> None:
    """Writes the file in one step, because another process may wait for it."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    os.replace(partial, path)


def _injectors() -> str:
    return str(files("torchaos.injectors"))


VERSION = 1
LEASE_S = 10.0  # seconds without a message of the controller, after which the agent undoes all
BEAT_S = 1.0


def mark_of(run_id: str, node: int, submission: int) -> str:
    """The name of a node's part of a run. It is the mark of the processes on the node, and the name of the node's
    folder."""
    return f"{run_id}.node{node}" + (f".{submission}" if submission else "")


_EXCHANGES = 8  # the fewest exchanges of clock readings in a measurement
_CLOCK_S = 60.0  # seconds between measurements of the clocks, which drift by some ms in that time
_AGAIN_S = 0.3
_ANSWER_S = 60.0


class NoAnswer(ChaosError):
    """The agent of a node does not answer."""


@dataclass
class Handler:
    """The functions that a channel calls for the messages of its node. Each is called in a thread of the channel."""

    up: Callable[[int, Mapping[str, Any]], None]  # (node, hello): the agent of the node has connected, maybe again
    take: Callable[
        [list[Event]], None
    ]  # events of the node; times are in this machine's clock, and pids are unique in the job
    lost: Callable[[int, str], None]  # (node, why): the agent has ended without a message, or can't be reached any more
    lapsed: Callable[[int, str], None]  # (node, why): the agent has undone everything by itself


@dataclass
class NodeChannel:
    """The connection to the agent of `node`. `argv`: the command that connects. When it ends, it is started again, for
    at most `patience_s` seconds. `keep`: the run directory into which the node's part of the record is written, if the
    node does not see that directory itself."""

    node: int
    argv: Sequence[str]
    on: Handler
    keep: Path | None = None
    patience_s: float = 120.0
    left: threading.Event = field(default_factory=threading.Event)  # the agent has sent its last message, or is lost
    connected: bool = False  # the agent has sent something through the present pipe, which is still open
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
        """Sends a message that has no answer. The message is lost if the pipe is broken."""
        with self._lock, suppress(OSError, ValueError):
            if self._process and self._process.stdin:
                self._process.stdin.write(json.dumps({"do": do, **words}).encode() + b"\n")
                self._process.stdin.flush()

    def ask(self, do: str, timeout_s: float = _ANSWER_S, **words: Any) -> Any:
        """Sends a message, and returns the agent's answer. Raises NoAnswer if there is none within `timeout_s`
        seconds."""
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
        """Closes the connection. If the agent is alive, it undoes everything."""
        self._closed.set()
        self.tell("leave")
        self.left.set()
        self._hang_up()

    def await_end(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` seconds until the connection is over and `on.lost`, if it was called, has
        returned."""
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
        """Runs the command that connects, until it ends. Returns the reason if another try makes no sense, otherwise an
        empty text."""
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
                except OSError as error:  # of this machine's disk
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
            self._take_event(said["event"], int(said["n"]))
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

    def _take_event(self, line: str, number: int) -> None:
        event = read(line)
        self._heard = number + 1
        if self.keep is not None:
            append(self.keep, f"events/sent-by-node{self.node}.jsonl", line.encode() + b"\n")
        self.on.take([on_node(replace(event, mono_s=event.mono_s + self._offset_s), self.node)])

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
