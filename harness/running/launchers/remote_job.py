"""A job whose nodes are other machines. The agents of the nodes observe the job's processes and apply the faults. This
process follows the commands that started the job, and collects the events of the agents."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torchaos.harness import registry
from torchaos.harness.host import disk, processes
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Node, RankProcess, RemoteLauncher
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.events.merged import beside_steps
from torchaos.harness.record.events.node_clocks import NodePid
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.running.fault_checks import Permits, is_controllers
from torchaos.harness.running.launchers.fault_appliers import FaultApplier, RemoteFaults
from torchaos.harness.running.launchers.job import Command, StartedNode, SubmittedJob, first_failure
from torchaos.harness.running.launchers.node_channel import Handler, NodeChannel, base_file, mark_of

TORCHAOS = (sys.executable, "-m", "torchaos.harness")
_BYE_S = 20.0  # seconds to wait for the last messages of an agent that does not answer
_RECOVER_S = 60.0
_GONE_S = 2.0  # seconds between looks whether a node is gone
_LOOK_S = 0.05


class RemoteJob(SubmittedJob):
    """A job whose nodes are other machines. `faults`: the faults of the plan. `new_log`: given if torchaos attaches to
    a running job; the agents read all other output. The methods may be called from any thread."""

    is_here: ClassVar[bool] = False
    journals: ClassVar[str] = "harness*.jsonl"  # the agents send their events, which a shared disk may show late
    queue_s: ClassVar[float] = 24 * 3600.0
    _launcher: RemoteLauncher

    def __init__(
        self, spec_for: Callable[[int], JobSpec], launcher: RemoteLauncher, journal: Journal, run_dir: Path, *,
        faults: Sequence[PlannedFault] = (), resubmit_times: int = 0, resubmit_delay_s: float = 0.0,
        record_undo: Callable[[Sequence[Handle], int], None] | None = None, new_log: Callable[[], JobLog] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            spec_for, launcher, journal, resubmit_times=resubmit_times, resubmit_delay_s=resubmit_delay_s,
            record_undo=record_undo,
        )  # fmt: skip
        self._run_dir = run_dir
        self._new_log = new_log
        self._logs: list[JobLog] = []  # of the nodes, if torchaos attached
        ours = (one.id for one in faults if is_controllers(registry.find("injectors", one.inject), launcher.name))
        planned = {fault.id: fault for fault in faults}
        self.faults = RemoteFaults(planned, lambda: self._channels, self.ranks, frozenset(ours))
        self._ranks: dict[int, RankProcess] = {}
        self._channels: list[NodeChannel] = []
        self._commands: list[Command] = []
        self._trouble = ""
        self._hit_from_here: set[int] = set()  # nodes of this submission on which this process has applied a fault
        self._ranks_lock = threading.Lock()
        journal.listen(self._note)

    @property
    def trouble(self) -> str:
        return self._trouble

    def ranks(self) -> dict[int, RankProcess]:
        with self._ranks_lock:
            return dict(self._ranks)

    def appliers(self, permits: Permits) -> Sequence[FaultApplier]:
        self.faults.permits = permits
        return (self.faults,)

    def nodes(self) -> list[StartedNode]:
        """The nodes, without their processes, which only the agents know."""
        return [StartedNode(node, self._mark, dict) for node in self._nodes]

    def agents(self, nodes: Sequence[int] = ()) -> list[Any]:
        raise ChaosError("the processes of other machines are known to their agents alone")

    def _terminate(self, grace_s: float, hurried: Callable[[], bool]) -> None:
        for number in () if self._attached else (signal.SIGTERM, signal.SIGKILL):
            for channel in self._channels:
                channel.tell("signal", number=int(number))
            self._await_done(grace_s, hurried)

    def _kill(self) -> list[int]:
        for channel in self._channels:
            channel.close()
        with self.faults.recovering:
            return processes.end(self.members)

    @property
    def _attached(self) -> bool:
        return self._new_log is not None

    def _channel(self, node: int) -> NodeChannel:
        return next(channel for channel in self._channels if channel.node == node)

    def _start_nodes(self, spec: JobSpec) -> None:
        # Without this file, the nodes would compute the number from the events that they see, which may differ.
        disk.write_atomically(base_file(self._run_dir, self._submission), str(self._base))
        wrapper = [*TORCHAOS, "exec", "--run", str(self._run_dir), "--served", str(self._submission)]
        commands = self._launcher.commands(spec, self._nodes, wrapper)
        self._logs = [self._log_for(node) for node in self._nodes] if self._attached else []
        readers = [log.line for log in self._logs] or [_ignore] * len(commands)
        cwd = spec.cwd if spec.cwd.is_dir() else self._run_dir  # that of the pods may not exist on this machine
        self._commands = [
            Command(argv, cwd, spec.env, spec.log.with_name(f"launch-{self._submission}.{number}.log"), reader)
            for number, (argv, reader) in enumerate(zip(commands, readers, strict=True))
        ]
        on = Handler(self._connected, self._journal.take, self._lost, self._lapsed)
        keep = None if self._launcher.shares_folder else self._run_dir
        self._hit_from_here.clear()
        self.faults.submitted_again()
        self._channels = [
            NodeChannel(node.index, node.argv([*TORCHAOS, "node", "--join", self._agent_mark(node.index)]), on, keep)
            for node in self._nodes
        ]
        attached = {"attached": True} if self._attached else {}
        self._emit_started(self._commands[0].pid, 0, **attached)
        for channel in self._channels:
            channel.start()

    def _log_for(self, node: Node) -> JobLog:
        assert self._new_log is not None
        log = self._new_log()
        log.host_pid = partial(NodePid.of, node.index)
        return log

    def _agent_mark(self, node: int) -> str:
        return mark_of(self._mark, node, self._submission)

    def _await_exit(self) -> tuple[int | None, float]:
        codes = self._codes_of_attached() if self._attached else [command.wait() for command in self._commands]
        at_s = time.monotonic()
        self._await_last_messages()
        return self._code(codes), at_s

    def _codes_of_attached(self) -> list[int | None]:
        """Waits until the agent of each node has sent its last message, or the container of the node has ended. The
        exit codes are not known here, because a container may go on after the job."""
        pairs = list(zip(self._channels, self._commands, strict=True))
        while not all(channel.left.is_set() or command.over for channel, command in pairs):
            time.sleep(_LOOK_S)
        return [None]

    def _await_last_messages(self) -> None:
        """Waits for the last messages of the agents. As long as an agent answers, its part of the job goes on, even if
        the command that started it is dead. Undoes the changes of each lost agent, before another submission starts
        agents on the same nodes."""
        end = time.monotonic() + _BYE_S
        for channel in self._channels:
            look_s = time.monotonic() + _GONE_S
            while not channel.left.wait(_LOOK_S) and time.monotonic() < end:
                if channel.alive:
                    end = time.monotonic() + _BYE_S
                if time.monotonic() > look_s and not channel.connected:
                    if self._launcher.gone(self._node_of(channel.node)):
                        break  # no message can come any more
                    look_s = time.monotonic() + _GONE_S
        for channel in [channel for channel in self._channels if not channel.left.is_set()]:
            channel.left.set()
            self._lost(channel.node, "its agent ended without a word")
        for channel in self._channels:
            channel.close()
            channel.await_end(_RECOVER_S)

    def _node_of(self, node: int) -> Node:
        return next(each for each in self._nodes if each.index == node)

    def _code(self, codes: Sequence[int | None]) -> int | None:
        """The first exit code other than 0, of the nodes that were in the job at its end. `codes`: the exit codes of
        the launcher's commands, used if an agent reported none."""
        # In a job to which torchaos attached, each node counts its own attempts, and a rank may have ended unseen.
        nodes = set() if self._attached else self._nodes_at_end()
        nodes = nodes or {node.index for node in self._nodes}
        exits = {
            event.data["node"]: event.data["exit_code"] for event in beside_steps(self._journal.snapshot())
            if event.kind is Kind.NODE_EXITED and event.data["submission"] == self._submission
        }  # fmt: skip
        return first_failure(codes if nodes - exits.keys() else (exits[node] for node in sorted(nodes)))

    def _connected(self, node: int, hello: Mapping[str, Any]) -> None:
        """Called when an agent has connected, for the first time or again. Checks the node, and sends the agent the
        state of all faults."""
        if hello["lapsed"]:
            self._lapsed(node, str(hello["lapsed"]))
        if hello["trouble"] and self.faults.planned:
            self._give_up(f"on node {node} nothing can be injected: {hello['trouble']}")
        if hello["missing"] and self.faults.planned:
            self._give_up(f"node {node} lacks {', '.join(hello['missing'])}; see torchaos doctor there")
        self.faults.send_state(self._channel(node))

    def _lapsed(self, node: int, why: str) -> None:
        if node not in self._hit_from_here:
            self._give_up(f"the agent of node {node} undid everything by itself: {why}")

    def _lost(self, node: int, why: str) -> None:
        """Called when a node's agent is lost. The agent's reaper undoes its changes. If the reaper is dead, too, a new
        process on the node does."""
        if self._ending.is_set():
            return
        ended = self._launcher.exit_code(self._node_of(node)) if self._attached else None
        if ended is not None:  # the agent ended with the container of the job
            data = {"submission": self._submission, "node": node, "pid": 0, "exit_code": ended}
            self._journal.emit(Kind.NODE_EXITED, data)
        with self.faults.recovering:
            if node not in self._hit_from_here and ended is None:
                self._give_up(f"node {node} was lost: {why}")
            self._recover_node(node)

    def _recover_node(self, node: int) -> None:
        reach = self._node_of(node)
        argv = reach.argv([*TORCHAOS, "node", "--recover", self._agent_mark(node)])
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RECOVER_S, check=False
            )  # fmt: skip
            fine = done.returncode == 0 or self._launcher.gone(reach)
            wrong = "" if fine else (done.stdout + done.stderr).strip()[-300:] or "nobody can say"
        except (OSError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        said = f"node {node} after the loss of its agent: {wrong or 'what it held is undone'}"
        with suppress(ChaosError):
            self._journal.emit(Kind.NOTE, {"text": said})
            for fault in self.faults.begun_on(node):
                data = {"fault": fault, "verified": not wrong, "reason": wrong and said}
                self._journal.emit(Kind.ROLLED_BACK, data)

    def _give_up(self, why: str) -> None:
        self._trouble = self._trouble or why

    def _note(self, event: Event) -> None:
        """Keeps `ranks` up to date. The journal calls it for each event of all nodes."""
        if event.kind is Kind.RANK_UP and event.rank is not None:
            data, attempt = event.data, event.attempt or 0
            rank = RankProcess(
                event.rank, data["local_rank"] or 0, data["node"] or 0, data["pid"], data["start_ticks"] or 0, attempt,
                data["world_size"] or 0, data.get("gpu"),
            )  # fmt: skip
            with self._ranks_lock:
                self._ranks[event.rank] = rank
            for log in self._logs:  # torchrun reports a restart only at log level INFO, which may be off
                log.in_round(attempt)
        elif event.kind is Kind.RANK_EXITED and event.rank is not None:
            with self._ranks_lock:
                if (known := self._ranks.get(event.rank)) and known.pid == event.data["pid"]:
                    del self._ranks[event.rank]
        elif event.kind is Kind.APPLYING and event.data["fault"] in self.faults.ours:
            self._hit_from_here.add(event.data["node"])
        else:
            self.faults.note(event)


def _ignore(text: str, mono_s: float) -> None:
    """Drops a line of a launcher's command, because the agents read the output of their nodes."""
