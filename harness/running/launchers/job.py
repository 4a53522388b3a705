"""The common parts of all jobs that the harness starts: the environment and the output of a command (`Command`), the
command on one node (`NodeRun`, `StartedNode`), what faults see of a running job (`JobView`), and a job with its
submissions (`SubmittedJob`).

A job is submitted as a scheduler does it: again after a failure, until no submission is left. The user's command and
working directory are not changed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torchaos.harness import agent
from torchaos.harness.fault_drivers.proxy import Endpoint
from torchaos.harness.fault_drivers.site import Victim
from torchaos.harness.host import processes
from torchaos.harness.host.native_libraries import ENV_CONTROL
from torchaos.harness.host.processes import wait_for
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher, LiveNode, Node, RankProcess, UsageError
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.monitoring.probes.process_tree import environ_of
from torchaos.harness.monitoring.probes.rank_probe import RankWatch
from torchaos.harness.protocol.wire import (
    ENV_AGENT_PID,
    ENV_ATTEMPT_BASE,
    ENV_NODE,
    ENV_PLAN,
    ENV_REPLICA,
    ENV_ROUND,
    ENV_RUN_ID,
    Kind,
)
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.events.merged import beside_steps
from torchaos.harness.running.fault_checks import Permits
from torchaos.harness.running.launchers.fault_appliers import FaultApplier

BOOTSTRAP = Path(agent.__path__[0]).resolve() / "bootstrap"

# Set only if the user does not set them. Attempts and pids are read from torchrun's event log, and from its lines about
# restarts, which have the level INFO.
_UNLESS_SET = {"PET_EVENT_LOG_HANDLER": "console", "LOGLEVEL": "INFO", "PYTHONUNBUFFERED": "1"}


def job_env(
    base_env: Mapping[str, str], *, run_id: str, agent_plan: Path | None, attempt_base: int = 0,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """The environment of a job. `extra`: the variables in the scenario. Without `agent_plan`, no agent is added, and
    PYTHONPATH is not changed."""
    env = {**base_env, **(extra or {})}
    for name in (
        ENV_PLAN,
        ENV_AGENT_PID,
        ENV_NODE,
        ENV_REPLICA,
        ENV_ROUND,
    ):  # of an outer run, if this run is part of one
        env.pop(name, None)
    for name, value in _UNLESS_SET.items():
        env.setdefault(name, value)
    env[ENV_RUN_ID], env[ENV_ATTEMPT_BASE] = run_id, str(attempt_base)
    if agent_plan is not None:
        env[ENV_PLAN] = str(agent_plan)
        earlier = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(BOOTSTRAP)]
        env["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *earlier])
    return env


OnLine = Callable[[str, float], None]  # gets a line without its end, and the time at which it came (CLOCK_MONOTONIC)
_PIPE_BYTES = 1 << 20  # so that the job does not wait if the harness reads late
_LONGEST = 1 << 16  # bytes; a longer line is cut


class Command:
    """A command that was started. It runs in its own session, with an empty input, so that the harness's terminal does
    not affect it. Raises UsageError if it can't be started."""

    def __init__(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, on_line: OnLine
    ) -> None:  # fmt: skip
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lines = Lines(on_line)
        try:
            self._process = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            os.close(self._log)
            raise UsageError(f"{argv[0]}: can't be started in {cwd}: {error.strerror}; check job.command") from error
        self.pidfd, self._ticks = os.pidfd_open(self.pid), processes.ticks_of(self.pid)
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        try:
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except (OSError, AttributeError):  # over the user's limit; Python names F_SETPIPE_SZ only from 3.10 on
            pass
        self._reader = threading.Thread(target=self._read, name=f"log {self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return not processes.is_alive(self.pid, self._ticks)

    def wait(self) -> int:
        """Waits for the end. Returns the exit code; if negative, the number of the signal that ended the command."""
        first = self._process.returncode is None
        code = wait_for(self._process)
        if first:
            os.close(self.pidfd)
        return code

    def drain(self, timeout_s: float) -> bool:
        """Waits until all output was read. Returns False if a process still holds the other end of the pipe after
        `timeout_s` seconds."""
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _read(self) -> None:
        while chunk := os.read(self._pipe, 1 << 16):
            now = time.monotonic()
            try:
                os.write(self._log, chunk)
            except OSError:  # the disk is full: the job goes on anyway
                pass
            self._lines.feed(chunk, now)
        self._lines.end()
        os.close(self._log)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Lines:
    """Splits a stream into lines. A carriage return, as in a progress bar, also ends a line."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, chunk: bytes, mono_s: float) -> None:
        *whole, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        for line in whole:
            if line:
                self._on_line(line.decode(errors="replace"), mono_s)

    def end(self) -> None:
        self.feed(b"\n", time.monotonic())


@dataclass
class NodeRun:
    node: Node
    command: Command
    code: int | None = None  # None while it runs; negative: the signal's number
    expected: bool = False  # the command will be started again

    @property
    def over(self) -> bool:
        return self.code is not None and not self.expected


@dataclass(frozen=True)
class StartedNode:
    """A node of the running job; implements interfaces.LiveNode. `members`: returns the processes of the job. `again`:
    starts the command of the node with this index again. `expect`: announces such a start. Both are None if the command
    can't be started from here, because the node is another machine."""

    node: Node
    run_id: str
    members: Callable[[], Mapping[int, int]]
    again: Callable[[int], int] | None = None
    expect: Callable[[int], None] | None = None
    local: Path | None = None  # the path at which each node has a folder of its own

    def processes(self) -> dict[int, int]:
        here = _place(self.node.env)
        return {pid: ticks for pid, ticks in self.members().items() if _place(environ_of(pid)) == here}

    def start_again(self) -> int:
        if self.again is None:
            raise self._no_return()
        return self.again(self.node.index)

    def lose_disk(self) -> None:
        if self.local is not None:
            subprocess.run(self.node.argv(["find", str(self.local), "-mindepth", "1", "-delete"]), check=True)

    def keep_place(self) -> None:
        if self.expect is None:
            raise self._no_return()
        self.expect(self.node.index)

    def _no_return(self) -> ChaosError:
        why = "is a machine of its own, and its command can't be started again from here"
        return ChaosError(f"node {self.node.index} {why}")


def _place(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    return env.get(ENV_NODE), env.get(ENV_REPLICA)


def first_failure(codes: Iterable[int | None]) -> int | None:
    """The first exit code other than 0; 0 if there is none."""
    return next((code for code in codes if code != 0), 0)


def start(node: Node, spec: JobSpec, base: int, log: JobLog, on_line: OnLine | None = None) -> NodeRun:
    """Starts the command on a node. `base`: the number of attempts before this start. `on_line`: receives the lines of
    the output; by default, `log` receives them. Raises UsageError if the command can't be started."""
    log.begin(base)
    spec = spec_of_node(node, spec, base)
    return NodeRun(node, Command(node.argv(spec.argv), spec.cwd, spec.env, spec.log, on_line or log.line))


def spec_of_node(node: Node, spec: JobSpec, base: int) -> JobSpec:
    """The spec for one node. Each node except the first has a log of its own. Each node has its own folder for the
    orders to the NVML overlay (the library that changes what NVML reports), because GPUs are numbered from 0 on each
    node."""
    env = {**spec.env, **node.env, ENV_ATTEMPT_BASE: str(base)}
    if ENV_NODE in env and (control := Path(env.get(ENV_CONTROL, os.devnull))).is_dir():
        own = control / f"node{node.index}"
        own.mkdir(exist_ok=True)
        env[ENV_CONTROL] = str(own)
    log = spec.log if node.index == 0 else spec.log.with_name(f"{spec.log.stem}.node{node.index}{spec.log.suffix}")
    return replace(spec, env=env, log=log)


class JobView:
    """The parts of a running job that a fault can hit, as they are now. This view can't start or end the job."""

    def __init__(self, watch: RankWatch, mark: str) -> None:
        """`mark`: the mark in the environment of the job's processes, see `processes.family`."""
        self._watch, self._mark = watch, mark

    def ranks(self) -> dict[int, RankProcess]:
        """The live ranks, by number. Ranks that are ambiguous or not up yet are left out."""
        return self._watch.ranks()

    def agents(self, nodes: Sequence[int] = ()) -> list[Victim]:
        """The torchelastic agents of these nodes, or of all nodes if `nodes` is empty. Raises ChaosError if a node has
        no agent now."""
        found = self._watch.agents()
        missing = [node for node in nodes if node not in found]
        if missing or not found:
            raise ChaosError(f"node {missing[0] if missing else 0} has no torchelastic agent now")
        return [Victim(*found[node], rank=None) for node in nodes or sorted(found)]

    def nodes(self) -> Sequence[LiveNode]:
        """The nodes, in order of their index."""
        return []

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The endpoints that have a proxy, by name."""
        return {}

    def members(self) -> dict[int, int]:
        """All living processes of the job: start times (clock ticks since boot) by pid."""
        living = {pid: ticks for pid, ticks in self._watch.members().items() if processes.is_alive(pid, ticks)}
        return {**living, **processes.family(self._mark)}


class RunningJob(JobView, ABC):
    """A job that the harness starts (or attaches to), follows to its end, and stops."""

    is_here: ClassVar[bool] = True  # its ranks are processes of this machine
    journals: ClassVar[str] = "*.jsonl"  # the files of events that are read during the run
    queue_s: ClassVar[float] = 0.0  # how long it may wait for its machines

    def __init__(self, watch: RankWatch, mark: str) -> None:
        super().__init__(watch, mark)
        self._exit_code: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="job", daemon=True)

    @abstractmethod
    def start(self) -> None:
        """Starts the job. Raises UsageError if the command can't be started."""

    @property
    def done(self) -> bool:
        """Whether the last submission has ended. Some of its processes may still be alive until `stop`."""
        return self._done.is_set()

    def appliers(self, permits: Permits) -> Sequence[FaultApplier]:
        """Who applies the faults on other machines. `permits`: what faults may touch."""
        return ()

    @property
    def trouble(self) -> str:
        """Why the run can't go on, as a clause; empty if nothing is wrong."""
        return ""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the last submission has ended. Returns its exit code; if negative, the number of a signal. None
        if it still runs, or if the code can't be known (only the parent process of an attached job gets it)."""
        return self._exit_code if self._done.wait(timeout_s) else None

    @abstractmethod
    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """Ends every process of the job. Returns the pids that could not be ended."""

    @abstractmethod
    def _live(self) -> None:
        """Follows the job to its end. Runs in its own thread."""


_LOOK_S = 0.05  # seconds between looks whether something has ended
_ATTEMPT_KINDS = (Kind.RANK_UP, Kind.AGENT_STARTED, Kind.ELASTIC_WORKER)


class SubmittedJob(RunningJob):
    """A job with all its submissions. `spec_for(n)` returns the spec of submission n, counted from 0. If a submission
    ends with an exit code other than 0, the next one is started, if any is left. `record_undo` writes to disk the undo
    of everything that the launcher makes for a submission; if it raises an error, nothing is made."""

    def __init__(
        self, spec_for: Callable[[int], JobSpec], launcher: Launcher, journal: Journal, *,
        resubmit_times: int = 0, resubmit_delay_s: float = 0.0,
        record_undo: Callable[[Sequence[Handle], int], None] | None = None,
    ) -> None:  # fmt: skip
        self._spec_for, self._launcher, self._journal = spec_for, launcher, journal
        self._times, self._delay_s, self._record_undo = resubmit_times, resubmit_delay_s, record_undo
        run_id = spec_for(0).env[ENV_RUN_ID]
        super().__init__(RankWatch(journal, run_id), run_id)
        self._nodes: list[Node] = []  # of the present submission
        self._submission, self._base, self._pid = 0, 0, 0
        self._ending, self._lock = threading.Event(), threading.Lock()

    def start(self) -> None:
        try:
            self._submit()
        except ChaosError:
            self._done.set()
            raise
        self._thread.start()

    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        self._launcher.give_up()
        with self._lock:
            self._ending.set()
        started = self._thread.ident is not None
        if started and not self._done.is_set():
            self._terminate(grace_s, hurried)
        left = self._kill()
        if started and not left:
            self._thread.join()
        self._stop_probes()
        self._done.set()
        return left

    @abstractmethod
    def _terminate(self, grace_s: float, hurried: Callable[[], bool]) -> None:
        """Asks the commands of the nodes to end, and gives them `grace_s` seconds for it."""

    def _await_done(self, wait_s: float, hurried: Callable[[], bool]) -> None:
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s and not hurried() and not self._done.wait(_LOOK_S):
            pass

    @abstractmethod
    def _kill(self) -> list[int]:
        """Ends every process of the job that is known here. Returns the pids that could not be ended."""

    def _stop_probes(self) -> None:
        """Called last by `stop`: no probe of the job is needed any more."""

    def _live(self) -> None:
        while True:
            self._exit_code, at_s = self._await_exit()
            data = {"submission": self._submission, "pid": self._pid, "exit_code": self._exit_code}
            self._journal.emit(Kind.JOB_EXITED, data, mono_s=at_s)
            again = self._exit_code != 0 and self._submission < self._times and not self._ending.is_set()
            self._after_submission(again)
            if not again or self._ending.wait(self._delay_s) or not self._submit_again():
                break
        self._done.set()

    def _submit_again(self) -> bool:
        with self._lock:  # so that `stop` either comes before this submission, or finds its processes
            if self._ending.is_set():
                return False
            self._submission += 1
            try:
                self._submit()
            except ChaosError as error:
                self._journal.emit(Kind.NOTE, {"text": f"the job could not be submitted again: {error}"})
                return False
        return True

    def _submit(self) -> None:
        self._base = self._next_attempt()
        spec = self._spec_for(self._submission)
        spec = replace(spec, env={**spec.env, ENV_ATTEMPT_BASE: str(self._base)})
        if resources := self._launcher.resources(spec):
            if self._record_undo is None:
                raise ChaosError(f"the launcher {self._launcher.name} makes resources whose undo is not on disk")
            self._record_undo(resources, self._submission)  # on disk before anything is made
        self._nodes = list(self._launcher.create(spec))
        self._start_nodes(spec)

    def _next_attempt(self) -> int:
        """The number of the next attempt. Restarts and submissions share one counter."""
        seen = [event.attempt for event in beside_steps(self._journal.snapshot()) if event.kind in _ATTEMPT_KINDS]
        return max((attempt for attempt in seen if attempt is not None), default=-1) + 1

    @abstractmethod
    def _start_nodes(self, spec: JobSpec) -> None:
        """Starts the command on the nodes of this submission. Raises UsageError if the command can't be started."""

    def _emit_started(self, pid: int, node: int, **data: object) -> None:
        """Records that this submission has started. `pid`: the first command, on the node `node`."""
        self._pid = pid
        data = {"submission": self._submission, "pid": pid, "node": node, **data}
        self._journal.emit(Kind.JOB_STARTED, data, attempt=self._base)

    @abstractmethod
    def _await_exit(self) -> tuple[int | None, float]:
        """Waits for the end of this submission. Returns its exit code, None if it is not known, and the time of the end
        (CLOCK_MONOTONIC)."""

    def _nodes_at_end(self) -> set[int]:
        """The nodes that had ranks in the last attempt of this submission. A node that left while the other nodes
        continued is not among them. Empty if no rank was up in this submission."""
        ups = [event for event in beside_steps(self._journal.snapshot()) if event.kind is Kind.RANK_UP]
        last = max((event.attempt or 0 for event in ups), default=0)
        return {event.data["node"] for event in ups if event.attempt == last and last >= self._base}

    def _after_submission(self, again: bool) -> None:
        """Cleans up after a submission. `again`: another submission may follow."""
