"""Runs the part of a job on one node, and records there what the harness records for nodes that it starts itself.
`NodeExec` wraps the node's command, under any scheduler. `attach` runs an agent beside a part of a job that was running
before; the agent ends with the run, and the job goes on. `recover` undoes what dead agents left.

The nodes share only the run directory. No port is opened, and no node waits for another, except that all wait for node
0 to make the run directory. If a launcher of `torchaos run` started the wrapper, the wrapper is also the agent of its
node (`serving`). The wrapper is a process of the node's part of the job, so a fault that ends the node ends the
wrapper, too."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from torchaos.harness import registry
from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError, JobSpec, UsageError
from torchaos.harness.monitoring.probes.gpu_probe import GpuWatch
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.monitoring.probes.process_tree import check_agent, environ_of, torchrun_here
from torchaos.harness.monitoring.probes.rank_probe import RankWatch, exit_code
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import ENV_NODE, ENV_PLAN, ENV_REPLICA, ENV_RUN_ID, Event, Kind
from torchaos.harness.record.events.journal import Journal, read_events
from torchaos.harness.record.events.node_clocks import Clock
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback import orphaned_runs
from torchaos.harness.rollback.reaper_client import UndoError
from torchaos.harness.running import capabilities
from torchaos.harness.running.fault_checks import needs_of_controller
from torchaos.harness.running.launchers.job import Command, job_env, start
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.node_channel import await_place, base_file, is_made, mark_of, receive
from torchaos.harness.running.launchers.torchrun_line import elastic_env
from torchaos.harness.running.nodes.agent_socket import JOB, make_place, remove_place, socket_of
from torchaos.harness.running.nodes.node_agent import Agent, NodeFaults, NodePart

_RECOVER_S = 120.0


def of_job(job: str) -> Iterator[Path]:
    """The folders of agents that ran in this Slurm job, of all users whose files the caller may read."""
    for folder in Path(tempfile.gettempdir()).glob("torchaos-*/*"):
        with suppress(OSError):
            owner = folder.lstat().st_uid
            theirs = folder.parent.name == f"torchaos-{owner}" and folder.parent.lstat().st_uid == owner
            if theirs and (folder / JOB).read_text() == job:
                yield folder


def undo_for_the_dead(journal: Journal) -> str:
    """Undoes the changes of this user's agents that died on this machine together with their reapers, as when a node
    goes down. Returns why that failed, or an empty text."""
    wrong = []
    for folder in (Path(tempfile.gettempdir()) / f"torchaos-{os.geteuid()}").glob("*"):
        if orphaned_runs.left_over(orphaned_runs.find([folder])[0]):
            failed = recover(folder)
            said = f"what {folder.name} left on this node is {f'not undone: {failed}' if failed else 'undone'}"
            journal.emit(Kind.NOTE, {"text": said})
            wrong += [said] if failed else []
    return "; ".join(wrong)


def recover(folder: Path) -> str:
    """Undoes the remaining changes of a dead agent. Returns why that failed, or an empty text. If the caller is root,
    this is done with the rights of the folder's owner, because the owner could have written the undo log."""
    owner = folder.stat()
    whose = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    argv = [sys.executable, "-m", "torchaos.harness", "node", "--recover", folder.name]
    try:
        done = subprocess.run(
            argv, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RECOVER_S, check=False,
            **whose,  # type: ignore[call-overload]
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-300:] or "it failed"


_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Relay:
    """A context manager for the main thread, which passes signals on to the command of the node. A signal that comes
    before the command exists is passed on later. A signal after the command's end reaches no process, because signals
    are sent through a pidfd and not to a pid."""

    def __init__(self) -> None:
        self.on_signal: Callable[[], None] = lambda: None  # called before a signal is passed on; must be quick
        self._pidfd: int | None = None
        self._waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def to(self, pidfd: int) -> None:
        """Sends signals to this process from now on. The caller closes its own descriptor."""
        self._pidfd = os.dup(pidfd)
        for number in self._waiting:
            self.send(number)

    def send(self, number: int) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.on_signal()
        if self._pidfd is None:
            self._waiting.append(number)
        else:
            self.send(number)


# Which capability a pod needs in place of another one: it makes no namespaces, but changes its own network.
_IN_A_POD = {"links": "own_network", "shaper": "tc"}
_MEET_S = 60.0  # seconds to wait for the controller, so that early faults are armed in time


@contextmanager
def serving(
    folder: RunDir, mark: str, node: int, part: NodePart, journal: Journal, relay: Relay
) -> Iterator[tuple[Agent, NodeFaults | None]]:
    """A context manager in which this process is the agent of its node. Begins when a controller has connected. Yields
    the agent and its faults; None in place of the faults if nothing can be injected here. At the end, undoes everything
    and, if that is verified, removes the node's folder."""
    place = make_place(mark)
    plan, faults, trouble = Plan.read(folder.plan), None, undo_for_the_dead(journal)
    try:
        faults = NodeFaults(plan, folder, place, mark, node, part, journal)
    except UndoError as error:  # the job runs, and the controller ends the run
        trouble = str(error)
    needs = set(plan.needs) - needs_of_controller(plan.launcher, (fault.inject for fault in plan.faults))
    if part.links:
        needs = {_IN_A_POD.get(name, name) for name in needs}
    findings = [capabilities.check(name) for name in sorted(needs)]
    missing = [f"{found.name} ({found.remedy})" for found in findings if not found.present]
    agent = Agent(
        socket_of(mark), node, journal, faults, relay.send, folder=folder.root, missing=missing, trouble=trouble
    )  # fmt: skip
    relay.on_signal = agent.undo_soon
    agent.await_controller(_MEET_S)
    try:
        yield agent, faults
    finally:
        clean = agent.settle()
        part.stop()
        agent.close()
        if clean:
            remove_place(mark)


_HERE, _ELSEWHERE = (
    NetworkNamespace(0, 0),
    NetworkNamespace(-1, 0),
)  # the network of a process that does not exist is never touched


def links_of_pods(addresses: Sequence[str], node: int, mark: str) -> list[Link]:
    """The link of each pod. Faults can change only the link of this pod, number `node`. `addresses`: the IP addresses
    of all pods. `mark`: the mark for the helper processes of faults. Raises ChaosError if this pod has no network."""
    device = _device()
    namespaces = [_HERE if index == node else _ELSEWHERE for index in range(len(addresses))]
    return [
        Link(namespace, namespace, device, device, address, f"n{index}", "/etc/hosts", mark)
        for index, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True))
    ]


def _device() -> str:
    """The device of the default route (route(5)); without such a route, the first device but the loopback."""
    routes = [line.split() for line in Path("/proc/self/net/route").read_text().splitlines()[1:]]
    default = [fields[0] for fields in routes if fields[1] == fields[7] == "00000000"]
    others = [name for _number, name in socket.if_nameindex() if name != "lo"]
    if not default and not others:
        raise ChaosError("this pod has no network device that a fault could change")
    return (default or others)[0]


READY = "attached"  # the only line on standard output
_LOOK_MS = 50


def attach(mark: str, given: IO[bytes]) -> None:
    """Runs as the agent of this node, beside a torchrun that was running before, until the job or the run ends. `mark`:
    the name of the agent. `given`: the data of `node_channel.packed`. All files are written below the node's folder,
    which is removed at the end. Raises UsageError if there is not exactly one torchrun of this user, or if this process
    has no right to observe it."""
    pid = torchrun_here()
    ticks, place = check_agent(pid), make_place(mark)
    os.environ["XDG_STATE_HOME"] = str(place.root / "state")  # so that nothing is left in the home folder
    try:
        folder = RunDir(place.root / "run")
        receive(folder.root, given)
        node, _hosts = await_place(folder.root, 0, 0.0)
        _serve(folder, mark, node, pid, ticks)
    except UsageError:
        remove_place(mark)
        raise


def _serve(folder: RunDir, mark: str, node: int, pid: int, ticks: int) -> None:
    pidfd = os.pidfd_open(pid)
    journal = Journal(folder.events, f"node{node}", node=node)
    watch = RankWatch(journal, None, node)
    watch.add_root(pid)
    environ = environ_of(pid)
    part = NodePart(watch, node, mark, {name: environ[name] for name in (ENV_NODE, ENV_REPLICA) if name in environ})
    watch.start()
    print(READY, flush=True)
    sys.stdout.close()
    try:
        with Relay() as relay, serving(folder, mark, node, part, journal, relay) as (agent, _):
            journal.emit(Kind.NODE_STARTED, {"submission": 0, "node": node, "pid": pid})
            if _await_end(pidfd, agent):
                data = {"submission": 0, "node": node, "pid": pid, "exit_code": exit_code(pid, ticks, pidfd)}
                journal.emit(Kind.NODE_EXITED, data, mono_s=time.monotonic())
    finally:
        watch.stop()
        journal.close()
        os.close(pidfd)


def _await_end(pidfd: int, agent: Agent) -> bool:
    """Waits until torchrun has ended, or the agent has undone everything. Returns whether torchrun has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not agent.lapsed:
        if poll.poll(_LOOK_MS):
            return True
    return False


PLAN_S = 120.0  # seconds to wait for the run directory, which node 0 makes
# The variables with the number of this node, as Slurm, torchrun, Kubernetes' indexed jobs, Open MPI and PBS set them.
NODE_VARIABLES = (
    ENV_NODE, "SLURM_NODEID", "PET_NODE_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_NODE_RANK",
    "PBS_NODENUM",
)  # fmt: skip
_DRAIN_S = 5.0
_END_S = 30.0  # seconds; torchrun gives its ranks the same time


def node_index(environ: Mapping[str, str]) -> int:
    """The number of this node. Raises UsageError if no variable gives it."""
    for name in NODE_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    raise UsageError(
        f"the number of this node is not known: write --node, or set one of {', '.join(NODE_VARIABLES[1:])}"
    )


class NodeExec:
    """Runs the command on node `node`, and writes the node's part of the record into the run directory. A call returns
    the command's exit code; if negative, the number of a signal. If a launcher of torchaos starts the wrapper as the
    agent of its node, `served` is the number of the submission, and `hosts` are the names of all nodes in order. Raises
    UsageError if the run directory does not appear or is not usable."""

    def __init__(
        self, folder: RunDir, node: int, command: Sequence[str], served: int | None = None, hosts: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self._folder, self._node = folder, node
        self._plan = _await_plan(folder)
        mark = self._plan.run_id if served is None else mark_of(self._plan.run_id, node, served)
        self._submission = max(_submissions(folder, node), served or 0)
        source = f"node{node}" + (f".{self._submission}" if self._submission else "")
        if served is None:
            self._journal = Journal(folder.events, source, follow=f"node{node}-*.jsonl")
        else:  # an agent also reads the events that the ranks of its node write
            self._journal = Journal(folder.events, source, node=node)
        base = _base(folder, self._submission)
        env = {**job_env(os.environ, run_id=mark, agent_plan=folder.agent_plan), ENV_NODE: str(node)}
        argv = tuple(word.replace("{run}", str(folder.job)) for word in command)
        log = folder.logs / f"job-{self._submission}.log"
        spec = JobSpec(argv, Path.cwd(), env, log, self._submission, max(1, len(hosts)))
        if hosts:
            job = replace(spec, env={**env, ENV_RUN_ID: self._plan.run_id})  # all nodes use the same rendezvous id
            env.update(elastic_env(node, job, hosts[0], hosts[node]))
        self._spec, self._base = spec, base
        self._log = JobLog(self._journal, None)
        self._log.by_round = True
        self._watch = RankWatch(self._journal, mark)
        self._gpus = GpuWatch(self._watch.ranks, self._journal.emit)
        self._clock = Clock(folder.root / "clock", node, self._journal.emit)
        self._mark, self._served, self._hosts = mark, served is not None, hosts

    def __call__(self) -> int:
        self._journal.listen(self._note_round)
        self._watch.start()
        self._gpus.start()
        try:
            with Relay() as relay:
                return self._serve(relay) if self._served else self._measure(relay)
        finally:
            self._gpus.stop()
            self._watch.stop()
            self._journal.close()

    def _measure(self, relay: Relay) -> int:
        """Runs the command without a controller. Meanwhile the nodes measure their clocks themselves."""
        self._clock.start()
        try:
            return self._run(relay)
        finally:
            self._clock.stop()

    def _serve(self, relay: Relay) -> int:
        """Runs the command as the agent of the node. The controller measures the clocks, and decides when faults
        begin."""
        part = NodePart(self._watch, self._node, self._mark, links=self._links())
        with serving(self._folder, self._mark, self._node, part, self._journal, relay) as (_, faults):
            if faults is not None:
                self._spec = replace(self._spec, env={**self._spec.env, ENV_PLAN: str(faults.write_plan(self._plan))})
            return self._run(relay)

    def _links(self) -> Sequence[Link]:
        """The links of all pods, if this node is a pod and the plan has faults that change its link. Otherwise
        empty."""
        plan = Plan.read(self._folder.plan)
        offers = registry.find("launchers", plan.launcher).offers
        is_changed = "links" in offers & set(plan.needs)
        return links_of_pods(self._hosts, self._node, self._mark) if is_changed else ()

    def _run(self, relay: Relay) -> int:
        command = start(LocalNode(self._node), self._spec, self._base, self._log, self._line).command
        relay.to(command.pidfd)
        try:
            return self._follow(command)
        except BaseException:
            _end(command, relay)
            raise

    def _follow(self, command: Command) -> int:
        self._watch.add_root(command.pid)
        about = {"submission": self._submission, "node": self._node, "pid": command.pid}
        kinds = [(Kind.NODE_STARTED, Kind.NODE_EXITED)]
        if self._node == 0 and not self._served:  # the node that serves the rendezvous
            kinds.append((Kind.JOB_STARTED, Kind.JOB_EXITED))
        for started, _ in kinds:
            self._journal.emit(started, about, attempt=self._base)
        code = command.wait()
        at_s = time.monotonic()
        command.drain(_DRAIN_S)
        for _, exited in kinds:
            self._journal.emit(exited, {**about, "exit_code": code}, mono_s=at_s)
        return code

    def _line(self, text: str, mono_s: float) -> None:
        """Handles a line of output: records its facts and, without a controller, prints it for the scheduler's log."""
        self._log.line(text, mono_s)
        if self._served:
            return
        with suppress(OSError, ValueError):
            print(text, flush=True)

    def _note_round(self, event: Event) -> None:
        if event.kind is Kind.ELASTIC_RENDEZVOUS and "round" in event.data:
            self._log.in_round(event.data["round"])


def node_of(hosts: Sequence[str], environ: Mapping[str, str]) -> int:
    """The number of this node among `hosts`. Raises UsageError if this machine is not one of them."""
    for name in (environ.get("SLURMD_NODENAME", ""), os.uname().nodename, os.uname().nodename.partition(".")[0]):
        if name in hosts:
            return hosts.index(name)
    raise UsageError(f"{os.uname().nodename} is none of the nodes {', '.join(hosts)}")


def _await_plan(folder: RunDir) -> AgentPlan:
    end = time.monotonic() + PLAN_S
    while not is_made(folder):
        if time.monotonic() > end:
            raise UsageError(f"{folder.root}: there is no run directory; start node 0 with --scenario, which makes it")
        time.sleep(0.1)
    return AgentPlan.read(str(folder.agent_plan))


def _submissions(folder: RunDir, node: int) -> int:
    """How many times this node was started before."""
    return len([*folder.events.glob(f"node{node}.jsonl"), *folder.events.glob(f"node{node}.*.jsonl")])


def _base(folder: RunDir, submission: int) -> int:
    """The number of attempts that earlier submissions used. The node that calls this first writes the number into a
    file, so that all nodes use the same."""
    file = base_file(folder.root, submission)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    seen = [event.attempt for event in read_events(folder.events) if event.attempt is not None] if submission else []
    partial = file.with_name(f".{file.name}.{os.getpid()}.{os.uname().nodename}")
    partial.write_text(str(max(seen, default=-1) + 1))
    with suppress(FileExistsError):
        os.link(partial, file)
    partial.unlink()
    return int(file.read_text())


def _end(command: Command, relay: Relay) -> None:
    """Ends the command with SIGTERM, later with SIGKILL, because the wrapper can't continue and no other process waits
    for the command."""
    relay.send(signal.SIGTERM)
    late = threading.Timer(_END_S, relay.send, (signal.SIGKILL,))
    late.start()
    command.wait()
    late.cancel()
    late.join()
