"""Jobs on this machine. `LocalJob` is submitted by the harness; if the plan needs it, `ProxiedLauncher` puts proxies in
front of its endpoints. `AttachedJob` was running before torchaos, has no agent, and goes on after the run; the user
gives the pid of its torchrun."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchaos.harness.fault_drivers.proxy import Endpoint, mark_of_server, start_toxiproxy
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher, Node, UsageError
from torchaos.harness.monitoring.probes.job_log import JobLog, MetricsFile
from torchaos.harness.monitoring.probes.process_tree import check_agent
from torchaos.harness.monitoring.probes.rank_probe import RankWatch, Sampling, exit_code
from torchaos.harness.protocol.wire import ENV_RUN_ID, Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.job import (
    Lines,
    NodeRun,
    RunningJob,
    StartedNode,
    SubmittedJob,
    first_failure,
    start,
)
from torchaos.harness.scenario.field_types import ENDPOINT

RENDEZVOUS = "rendezvous"
_RENDEZVOUS_ENV = "PET_RDZV_ENDPOINT"


@dataclass(frozen=True)
class ProxiedNode:
    """A node that replaces `{endpoint.NAME}` in the command and in the environment by the address that the job must
    use."""

    inner: Node
    env: Mapping[str, str]
    addresses: Mapping[str, str]  # by name

    @property
    def index(self) -> int:
        return self.inner.index

    @property
    def link(self) -> Any:
        return self.inner.link

    def argv(self, command: Sequence[str]) -> list[str]:
        return self.inner.argv([filled(word, self.addresses) for word in command])

    def host_pid(self, pid: int) -> int | None:
        return self.inner.host_pid(pid)


class ProxiedLauncher(Launcher):
    """A launcher that puts proxies in front of endpoints. `upstreams`: the job's endpoints by name. `proxied`: those
    that get a proxy, because a fault hits them. The job uses all others directly."""

    name: ClassVar[str]  # not set, because no scenario names this launcher

    def __init__(self, inner: Launcher, upstreams: Mapping[str, str], proxied: set[str], folder: Path) -> None:
        self._inner, self._upstreams, self._folder = inner, upstreams, folder
        self._proxied = {name: upstreams[name] for name in sorted(proxied)}
        self.endpoints: dict[str, Endpoint] = {}

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        servers = [JobProcesses(mark_of_server(spec.env[ENV_RUN_ID]))] if self._proxied else []
        return [*self._inner.resources(spec), *servers]

    def create(self, spec: JobSpec) -> Sequence[Node]:
        """Creates the nodes, and starts one proxy server for all submissions. Raises ChaosError if that fails."""
        nodes = self._inner.create(spec)
        lives = self.endpoints and all(endpoint.api.alive() for endpoint in self.endpoints.values())
        if self._proxied and not lives:
            self.endpoints = start_toxiproxy(self._proxied, spec.env[ENV_RUN_ID], self._folder, nodes[0].link)
        return [self._fronted(node, spec) for node in nodes]

    def _fronted(self, node: Node, spec: JobSpec) -> ProxiedNode:
        addresses = {**self._upstreams, **{name: endpoint.listen for name, endpoint in self.endpoints.items()}}
        if node.index == 0 and RENDEZVOUS in addresses:  # the first node serves the rendezvous itself
            addresses[RENDEZVOUS] = self._upstreams[RENDEZVOUS]
        env = {**{name: value for name, value in spec.env.items() if ENDPOINT in value}, **node.env}
        if RENDEZVOUS in addresses and env.get(_RENDEZVOUS_ENV) == self._upstreams[RENDEZVOUS]:
            env[_RENDEZVOUS_ENV] = addresses[RENDEZVOUS]
        return ProxiedNode(node, {name: filled(value, addresses) for name, value in env.items()}, addresses)


def filled(text: str, addresses: Mapping[str, str]) -> str:
    for name, address in addresses.items():
        text = text.replace(f"{{{ENDPOINT}{name}}}", address)
    return text


_DRAIN_S = 1.0  # seconds to wait for the last lines of the output, which come after the exit
_LOOK_S = 0.05  # seconds between checks whether a node's command was started again


class LocalJob(SubmittedJob):
    """A job whose processes are on this machine. The methods may be called from any thread."""

    def __init__(
        self, spec_for: Callable[[int], JobSpec], launcher: Launcher, journal: Journal, *,
        resubmit_times: int = 0, resubmit_delay_s: float = 0.0,
        record_undo: Callable[[Sequence[Handle], int], None] | None = None,
        new_log: Callable[[], JobLog] | None = None, metrics: Path | None = None,
    ) -> None:  # fmt: skip
        self._new_log = new_log or partial(JobLog, journal, None)
        super().__init__(
            spec_for, launcher, journal, resubmit_times=resubmit_times, resubmit_delay_s=resubmit_delay_s,
            record_undo=record_undo,
        )  # fmt: skip
        self._logs: dict[int, JobLog] = {0: self._new_log()}  # by node
        self._sampling = Sampling([MetricsFile(metrics)] if metrics else [], self._logs[0].emit)
        self._runs: dict[int, NodeRun] = {}  # the nodes of this submission that were started, by index
        self._exited_s = 0.0  # when the last command ended, CLOCK_MONOTONIC
        journal.listen(self._note_attempt)

    def start(self) -> None:
        self._watch.start()
        try:
            super().start()
        except ChaosError:
            self._watch.stop()
            raise
        self._sampling.start()

    def nodes(self) -> list[StartedNode]:
        with self._lock:
            nodes = list(self._nodes)
        local = self._spec_for(self._submission).local
        again, keep = self._start_again, self._keep_place
        return [StartedNode(node, self._mark, self.members, again, keep, local) for node in nodes]

    def endpoints(self) -> Mapping[str, Endpoint]:
        return self._launcher.endpoints if isinstance(self._launcher, ProxiedLauncher) else {}

    def _terminate(self, grace_s: float, hurried: Callable[[], bool]) -> None:
        """Sends SIGTERM to the commands that were started, which pass it on to their ranks. Also sends SIGCONT to all
        processes, because a stopped process can't act on SIGTERM."""
        if grace_s <= 0:
            return
        members, heads = self.members(), {run.command.pid for run in list(self._runs.values())}
        for pid, ticks in members.items():
            for number in (signal.SIGTERM, signal.SIGCONT) if pid in heads else (signal.SIGCONT,):
                with suppress(OSError):
                    processes.send({pid: ticks}, number)
        self._await_done(grace_s, hurried)

    def _kill(self) -> list[int]:
        left = processes.end(self.members)
        if left:
            text = f"processes of the job could not be ended: {', '.join(map(str, left))}"
            self._journal.emit(Kind.NOTE, {"text": text})
        return left

    def _stop_probes(self) -> None:
        self._drain()
        self._sampling.stop()
        self._watch.stop()

    def _start_nodes(self, spec: JobSpec) -> None:
        self._runs = {}
        for node in self._nodes[: spec.busy_nodes or None]:
            self._start(node, spec, self._base)
        first = next(iter(self._runs.values()))
        self._emit_started(first.command.pid, first.node.index)

    def _start_spares(self) -> None:
        """Starts the standby nodes when all ranks are up, or when a node has ended before that. If a standby node
        started earlier, it could take the place of another node."""
        spares = [node for node in self._nodes if node.index not in self._runs]
        if not spares or not (self._all_up() or any(run.code is not None for run in self._runs.values())):
            return
        with self._lock:
            if not self._ending.is_set() and not all(run.over for run in self._runs.values()):
                for node in spares:
                    self._start(node, self._spec_for(self._submission), self._base)

    def _all_up(self) -> bool:
        ranks = self._watch.ranks()
        return any(len(ranks) >= rank.world_size and rank.attempt >= self._base for rank in ranks.values())

    def _start(self, node: Node, spec: JobSpec, base: int) -> None:
        several = len(self._nodes) > 1
        log = self._logs.setdefault(node.index, self._new_log())
        log.by_round, log.host_pid = several and spec.replicas == 1, node.host_pid
        if spec.replicas > 1:
            log.replica, log.first_rank = node.index, node.index * spec.replica_ranks
        run = start(node, spec, base, log)
        self._runs[node.index] = run
        self._watch.add_root(run.command.pid)
        if several:
            data = {"submission": self._submission, "node": node.index, "pid": run.command.pid}
            self._journal.emit(Kind.NODE_STARTED, data, attempt=base)

    def _start_again(self, index: int) -> int:
        if index not in self._runs:
            raise ChaosError(f"node {index} can't be started again: it is spare, and was not started yet")
        run, end_s = self._runs[index], time.monotonic() + _DRAIN_S
        pid = run.command.pid
        while run.code is None and not processes.is_alive(pid, processes.ticks_of(pid)) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)  # the command has just ended, and its exit was not noted yet
        with self._lock:
            run = self._runs[index]
            run.expected = False
            if self._ending.is_set() or self._done.is_set() or run.code is None:
                raise ChaosError(f"node {index} can't be started again: the job is over, or the node is still there")
            # Node 0 serves the rendezvous, so it begins a new one. Any other node joins the present rendezvous.
            base = self._next_attempt() if index == 0 else self._base
            self._start(run.node, self._spec_for(self._submission), base)
            return self._runs[index].command.pid

    def _keep_place(self, index: int) -> None:
        if index in self._runs:
            self._runs[index].expected = True

    def _await_exit(self) -> tuple[int | None, float]:
        """The exit code is the first other than 0, of the nodes that were in the job at its end. With replicas, every
        replica counts."""
        while not all(run.over for run in list(self._runs.values())):
            if self._ending.is_set():
                for run in self._runs.values():
                    run.expected = False
            self._take_exits([run for run in list(self._runs.values()) if run.code is None])
            self._start_spares()
        self._pid = next(iter(self._runs.values())).command.pid  # another one, if the command was started again
        last = self._nodes_at_end() if self._spec_for(self._submission).replicas == 1 else set()
        return first_failure(
            run.code or 0 for index, run in self._runs.items() if not last or index in last
        ), self._exited_s

    def _take_exits(self, running: Sequence[NodeRun]) -> None:
        poll = select.poll()
        by_pidfd = {run.command.pidfd: run for run in running}
        for pidfd in by_pidfd:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _events in poll.poll(None if running and len(self._nodes) == 1 else _LOOK_S * 1000):
            self._exited_s, run = time.monotonic(), by_pidfd[pidfd]
            run.code = run.command.wait()
            if len(self._nodes) > 1:
                data = {"submission": self._submission, "node": run.node.index, "pid": run.command.pid}
                self._journal.emit(Kind.NODE_EXITED, {**data, "exit_code": run.code}, mono_s=self._exited_s)

    def _note_attempt(self, event: Event) -> None:
        if event.kind is Kind.ELASTIC_RENDEZVOUS and "round" in event.data and event.data["node"] in self._logs:
            self._logs[event.data["node"]].in_round(event.data["round"])
        if event.kind is Kind.TORCHRUN and event.attempt is not None:
            self._logs[0].begin_again(event.attempt)

    def _drain(self) -> None:
        for run in list(self._runs.values()):
            run.command.drain(_DRAIN_S)

    def _after_submission(self, again: bool) -> None:
        """Reads the last output. If another submission may follow, first ends the processes that are left, as a
        scheduler does."""
        leftover = self.members() if again else {}
        if leftover:
            text = f"processes that outlived submission {self._submission}, and were ended now: {len(leftover)}"
            self._journal.emit(Kind.NOTE, {"text": text})
            processes.end(self.members)
        self._drain()


_TAIL_S = 0.02


class AttachedJob(RunningJob):
    """A job to which torchaos attaches. `log`: the file with the job's output, if there is such a file. It is read from
    its present end. Raises UsageError unless `pid` is a torchelastic agent of this user."""

    def __init__(
        self, pid: int, journal: Journal, *, log: Path | None = None,
        new_log: Callable[[], JobLog] | None = None, metrics: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(RankWatch(journal, mark=None), "")
        self.pid, self._ticks = pid, check_agent(pid)
        self._pidfd = os.pidfd_open(pid)
        self._journal, self._log = journal, new_log() if new_log else JobLog(journal, None)
        self._tail = _Tail(log, Lines(self._log.line)) if log else None
        self._sampling = Sampling([MetricsFile(metrics)] if metrics else [], self._log.emit)
        self._left = threading.Event()

    def start(self) -> None:
        data = {"submission": 0, "pid": self.pid, "node": 0, "attached": True}
        self._journal.emit(Kind.JOB_STARTED, data)
        self._journal.listen(self._note_attempt)
        self._watch.add_root(self.pid)
        self._watch.start()
        self._sampling.start()
        self._thread.start()

    def members(self) -> dict[int, int]:
        return {**self._watch.members(), self.pid: self._ticks}

    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """Only stops watching: torchaos does not end a job that it did not start. Returns an empty list."""
        if not self._left.is_set() and self._thread.ident is not None:
            self._left.set()
            self._thread.join()
            self._sampling.stop()
            self._watch.stop()
            os.close(self._pidfd)
        return []

    def _note_attempt(self, event: Event) -> None:
        """Notes the attempt of a rank that started. torchrun reports a restart only at log level INFO, which may be
        off."""
        if event.kind is Kind.RANK_UP and event.attempt is not None:
            self._log.in_round(event.attempt)

    def _live(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        while not self._left.is_set():
            gone = poll.poll(_TAIL_S * 1000)
            at_s = time.monotonic()
            if self._tail:
                self._tail.read(at_s)
            if gone:
                self._exit_code = exit_code(self.pid, self._ticks, self._pidfd)
                data = {"submission": 0, "pid": self.pid, "exit_code": self._exit_code}
                self._journal.emit(Kind.JOB_EXITED, data, mono_s=at_s)
                self._done.set()
                return


class _Tail:
    """Reads the text that is appended to a file from now on. The time of a line is the time of reading, up to 20 ms
    late."""

    def __init__(self, path: Path, lines: Lines) -> None:
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"{path}: the job's log can't be read: {error.strerror}") from error
        self._file.seek(0, os.SEEK_END)
        self._lines = lines

    def read(self, mono_s: float) -> None:
        while chunk := self._file.read(1 << 16):
            self._lines.feed(chunk, mono_s)
