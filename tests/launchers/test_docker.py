"""A job on two nodes, each a container of a private engine: which ranks are where, what reaches them, and what is
left."""

from __future__ import annotations

import errno
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_engine import missing
from waiting import wait_until

from torchaos.harness import registry
from torchaos.harness.fault_drivers.containers import changes
from torchaos.harness.fault_drivers.network.links import Link, PacketDrop, counts
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.host import processes
from torchaos.harness.host.cluster_tools import address, engine, of_run
from torchaos.harness.interfaces import ChaosError, JobSpec, UsageError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import Journal, read_events
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.running import capabilities
from torchaos.harness.running.launchers.docker import Container, Docker, make_host_image
from torchaos.harness.running.launchers.job import job_env
from torchaos.harness.running.launchers.local_job import LocalJob

TRAINER = Path(__file__).parent / "trainers" / "linger.py"
_SHELL = "echo I am $TORCHAOS_NODE of $PET_NNODES, $(hostname), $PET_LOCAL_ADDR; {then}"
_IDLE = "trap 'echo told; exit 7' TERM; : >up-$TORCHAOS_NODE; while :; do sleep 0.05; done"


class Nodes:
    """Two nodes that run a shell script, or a job of two ranks."""

    def __init__(self, folder: Path, where: str, *command: str, **container: Any) -> None:
        self.folder, self.run_id, self.where = folder, f"docker-{uuid.uuid4().hex}", where
        for name in ("events", "logs"):
            (folder / name).mkdir()
        self.journal = Journal(folder / "events")
        plan = folder / "plan.json"
        AgentPlan(self.run_id, str(folder / "events"), ("steps",)).write(plan)
        extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        extra["PET_RDZV_CONF"] = "keep_alive_interval=1,keep_alive_max_attempt=3"  # a dead node is missed sooner
        env, own = (
            job_env(base, run_id=self.run_id, agent_plan=plan, extra=extra) for base in (os.environ, dict[str, str]())
        )
        self.spec = JobSpec(command, folder, env, folder / "logs" / "job-0.log", 0, 2, own)
        self.launcher = Docker(Container(**container))
        self.job = LocalJob(
            lambda _: self.spec, self.launcher, self.journal, record_undo=lambda resources, submission: None
        )

    def wait(self, look: Callable[[], Any], fits: Callable[[Any], Any] = bool, timeout_s: float = 300.0) -> Any:
        return wait_until(look, fits, timeout_s, lambda: f"{look()!r}; the logs say: {self.logs()[-3000:]}")

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "logs").iterdir()))

    def up(self, *names: str) -> None:
        self.wait(lambda: [(self.folder / name).exists() for name in names], all)

    def site(self, fault: str, *nodes: int) -> OutsideSite:
        cluster = self.job.nodes()
        chosen = [live for live in cluster if live.node.index in nodes]
        return OutsideSite(fault, (), self.journal.emit, nodes=chosen, cluster=cluster)

    def inject(self, name: str, node: int, **params: Any) -> Any:
        """Apply it as the engine of the harness does; the injector, whose `felt` can be asked."""
        site, fault = self.site(name, node), registry.find("injectors", name)(**params)
        self.journal.emit(Kind.APPLYING, {"fault": name, "phase": None, "global_step": None, "pid": None, "node": node})
        fault.apply(site)
        return fault

    def felt(self, fault: Any) -> Any:
        plan = Plan("made-up", "", 7, PlannedJob(("true",), "/", {}, 2, 2, 60.0), (), ())
        return fault.felt(Record(plan, tuple(self.journal.snapshot()), {}), fault.name)

    def left(self) -> list[Any]:
        with engine(self.where) as client:
            mine = of_run(self.run_id)
            found = client.containers(all=True, filters=mine) + client.networks(filters=mine)
            return [*found, *client.images(all=True, filters=mine), *processes.family(self.run_id)]

    def close(self) -> None:
        self.job.stop()
        for handle in reversed(self.launcher.resources(self.spec)):
            handle.undo()
            assert handle.is_undone(), handle
        self.journal.close()


@pytest.fixture
def nodes_of(tmp_path: Path, docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    made: list[Nodes] = []

    def make(*command: str, **container: Any) -> Nodes:
        made.append(Nodes(tmp_path, docker_engine, *command, **container))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.left() == []


@pytest.fixture
def idle(nodes_of: Callable[..., Nodes]) -> Nodes:
    """Two nodes that do nothing; on SIGTERM they say so and end."""
    one = nodes_of("/bin/sh", "-c", _SHELL.format(then=_IDLE))
    one.job.start()
    one.up("up-0", "up-1")
    return one


def test_every_node_has_a_log_and_an_exit_code(nodes_of: Callable[..., Nodes]) -> None:
    """Each container has its name, its environment, its files and its output; the exit code of the job is the first of
    a node that is not 0."""
    then = "grep -c node00 /etc/hosts; touch made-here-$TORCHAOS_NODE; exit $((3 * TORCHAOS_NODE))"
    nodes = nodes_of("/bin/sh", "-c", _SHELL.format(then=then))
    nodes.job.start()
    assert nodes.job.wait(300) == 3
    exits = [e for e in nodes.journal.snapshot() if e.kind in (Kind.NODE_EXITED, Kind.JOB_EXITED)]
    assert sorted((e.data["node"], e.data["exit_code"]) for e in exits[:2]) == [(0, 0), (1, 3)]
    assert [(e.kind, e.data["exit_code"]) for e in exits[2:]] == [(Kind.JOB_EXITED, 3)]
    logs = nodes.folder / "logs"
    assert (logs / "job-0.log").read_text() == "I am 0 of 2, node000, node000\n2\n"
    assert (logs / "job-0.node1.log").read_text() == "I am 1 of 2, node001, node001\n2\n"
    assert sorted(path.name for path in nodes.folder.glob("made-here-*")) == ["made-here-0", "made-here-1"]


def test_what_is_in_a_container(idle: Nodes) -> None:
    """The processes of a node are known by the pids that they have outside and inside; there are none of the other's,
    nor of the harness's own. Links cut apart in the nodes count what they drop, and stand again."""
    first, second = idle.job.nodes()
    assert first.processes()
    assert not first.processes().keys() & second.processes().keys()
    for live in (first, second):
        inner = [(processes.inner_pid(pid), pid) for pid in live.processes()]
        assert all(own or not processes.stat(pid) for own, pid in inner)  # a sleep is soon over
        found = {live.node.host_pid(own): pid for own, pid in inner if own and processes.stat(pid)}
        assert all(outer in (pid, None) for outer, pid in found.items())
        assert len(found) >= 2
        assert live.node.host_pid(12345) is None
    links = [link for live in (first, second) if (link := live.node.link)]
    cut = PacketDrop("apart", links[:1], links[1:])
    assert _connect(links[0], links[1]) == errno.ECONNREFUSED
    cut.apply()
    assert _connect(links[0], links[1]) == errno.EAGAIN
    assert counts(*cut.handles)["dropped"] >= 1
    for handle in cut.handles:
        handle.undo()
        assert handle.is_undone()
    assert _connect(links[0], links[1]) == errno.ECONNREFUSED


def _connect(source: Link, to: Link) -> int:
    """What comes of opening a connection to a port that nobody listens at."""
    code = f"s = socket.socket(); s.settimeout(1); print(s.connect_ex(({to.address!r}, 9)))"
    return int(source.namespace.run([sys.executable, "-c", f"import socket; {code}"]))


@pytest.mark.long
def test_a_node_is_killed_and_comes_back(idle: Nodes) -> None:
    """The container dies, the engine tells of it, the node's exit is that of SIGKILL; started again it is another
    container with the same name and address."""
    live = idle.job.nodes()[1]
    before, link = live.processes(), live.node.link
    live.keep_place()
    fault = idle.inject("container.kill", 1)
    gone = idle.wait(lambda: [e for e in idle.journal.snapshot() if e.kind is Kind.NODE_EXITED])
    assert [(event.data["node"], event.data["exit_code"]) for event in gone] == [(1, -9)]
    assert "node 1 died" in idle.felt(fault).what
    with pytest.raises(ChaosError, match="does not run"):
        changes(idle.site("again", 1), "running")
    (idle.folder / "up-1").unlink()
    live.start_again()
    idle.up("up-1")
    assert not before.keys() & live.processes().keys()
    now = live.node.link
    assert link
    assert now
    assert (now.address, now.name) == (link.address, link.name)
    assert now.namespace != link.namespace


@pytest.mark.long
def test_a_node_is_stopped(idle: Nodes) -> None:
    """The engine's SIGTERM reaches the command, which says so and ends with its own exit code, within its grace."""
    fault = idle.inject("container.stop", 1, grace=30.0)
    gone = idle.wait(lambda: [e for e in idle.journal.snapshot() if e.kind is Kind.NODE_EXITED])
    assert [(event.data["node"], event.data["exit_code"]) for event in gone] == [(1, 7)]
    assert "has ended" in idle.felt(fault).what
    assert (idle.folder / "logs" / "job-0.node1.log").read_text().endswith("told\n")


@pytest.mark.parametrize(
    ("name", "part", "params"),
    [
        ("container.pause", "running", {}),
        pytest.param("container.disconnect", "network", {}, marks=pytest.mark.long),
        pytest.param("container.limit", "limits", {"cpus": 0.01}, marks=pytest.mark.long),
        pytest.param("container.oom", "limits", {"spare_mb": 16.0}, marks=pytest.mark.long),
    ],
)
def test_faults_are_felt_and_taken_back(idle: Nodes, name: str, part: Any, params: dict[str, Any]) -> None:
    """Each is known by what the engine or the kernel tells of it, on the node that was hit; its handle mends it."""
    (handle,) = changes(idle.site(name, 1), part)
    assert handle.is_undone()
    fault = idle.inject(name, 1, **params)
    assert not handle.is_undone()
    if name == "container.limit":
        (probe,) = fault.probes(idle.site(name, 1))
        end = time.monotonic() + 30
        while not idle.felt(fault):
            assert time.monotonic() < end, "the kernel never held it back"
            probe.sample(idle.journal.emit)
    assert "node 1" in idle.felt(fault).what
    handle.undo()
    assert handle.is_undone()
    assert idle.job.nodes()[0].processes()


@pytest.mark.long
def test_another_image(nodes_of: Callable[..., Nodes], docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an image of the user's there is of this machine what the scenario and we add, and no other variable."""
    monkeypatch.setenv("OF_THE_HOST", "1")
    tag = f"users-own-{uuid.uuid4().hex}"
    with engine(docker_engine) as client:
        make_host_image(client, "somebody", tag)
        try:
            nodes = nodes_of("/usr/bin/env", image=f"{tag}:latest", mounts=["/usr:/usr:ro"])
            nodes.job.start()
            assert nodes.job.wait(300) == 0
            nodes.close()
        finally:
            client.remove_image(f"{tag}:latest", force=True)
    names = {line.partition("=")[0] for line in (nodes.folder / "logs" / "job-0.log").read_text().splitlines()}
    assert names >= {"TORCHAOS_PLAN", "TORCHAOS_NODE", "PET_NNODES", "OMP_NUM_THREADS"}
    assert "OF_THE_HOST" not in names


def test_an_image_that_is_not_there(nodes_of: Callable[..., Nodes]) -> None:
    """It is refused with a sentence that says what to do, and nothing is made."""
    nodes = nodes_of("true", image="nosuch/image:1")
    with pytest.raises(UsageError, match=r"the engine has no image nosuch/image:1; docker pull it first"):
        nodes.job.start()
    assert nodes.left() == []


@pytest.mark.long
def test_jobs_end_with_the_harness_s_word(idle: Nodes) -> None:
    """Stopping the job tells the commands in the containers first, and then none of its processes is left."""
    assert idle.job.stop(grace_s=20.0) == []
    assert processes.family(idle.run_id) == {}
    assert idle.logs().count("told") == 2


@pytest.mark.job
def test_two_ranks_in_containers(nodes_of: Callable[..., Nodes]) -> None:
    """Ranks are known by their pids outside, whatever they and torchelastic call themselves in a container: a rank that
    is killed from outside is the one that everybody tells of, and both come back in attempt 1."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2")
    nodes = nodes_of(*torchrun, str(TRAINER), ".", "--all-reduce")
    nodes.job.start()
    nodes.up("up-0-0", "up-1-0")
    ranks = nodes.wait(nodes.job.ranks, lambda found: len(found) == 2)
    assert {rank: one.node for rank, one in ranks.items()} == {0: 0, 1: 1}
    assert all(one.inner_pid and one.own_pid != one.pid for one in ranks.values())
    live = nodes.job.nodes()[1]
    assert ranks[1].pid in live.processes()
    assert processes.kill({ranks[1].pid: ranks[1].start_ticks}, time.monotonic() + 30) == []
    nodes.up("up-0-1", "up-1-1")
    (nodes.folder / "go-1").touch()
    assert nodes.job.wait(300) == 0
    nodes.journal.close()
    for events in (nodes.journal.snapshot(), read_events(nodes.folder / "events")):
        told = [e for e in events if e.attempt == 0 and e.rank == 1]
        for kind in (Kind.RANK_UP, Kind.AGENT_STARTED, Kind.ELASTIC_WORKER, Kind.ELASTIC_FAILURE, Kind.RANK_EXITED):
            found = {e.data["pid"] for e in told if e.kind is kind and "pid" in e.data}
            assert found <= {ranks[1].pid}, kind
            assert found or kind is Kind.AGENT_STARTED, kind  # the trainer may be killed before it imports torch
        assert not [e.data["text"] for e in events if e.kind is Kind.NOTE and "says that pid" in e.data["text"]]


@pytest.mark.parametrize("said", ["tcp://10.0.0.1:2375", "ssh://somebody@elsewhere"])
def test_an_engine_of_another_machine(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes and files could not be looked at; it is refused at once."""
    monkeypatch.setenv("DOCKER_HOST", said)
    with pytest.raises(UsageError, match=r"give unix://SOCKET"):
        address()
    assert not capabilities.check("docker").present


def test_doctor_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without an engine the check says what to install and start."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'nosuch.sock'}")
    found = capabilities.check("docker")
    assert not found.present
    assert "apt-get install docker.io" in found.remedy


def test_doctor_finds_the_engine(monkeypatch: pytest.MonkeyPatch, docker_engine: str) -> None:
    """With one it says which, and where."""
    assert missing() == ""
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    found = capabilities.check("docker")
    assert found.present
    assert found.detail.endswith(docker_engine)
