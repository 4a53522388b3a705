"""torchaos exec: it launches one node under any scheduler; and the nodes' files in the shared run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness.analysis.felt_evidence import died
from torchaos.harness.analysis.verdict import judge
from torchaos.harness.cli.node import make
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import FIELDS, Event, EventFile, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.events.node_clocks import Clock, Clocks
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.nodes import node_exec
from torchaos.harness.running.nodes.node_exec import NodeExec, node_index
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    job = {
        "command": "torchrun --nnodes 2 --nproc-per-node 1 train.py", "checkpoints": {"path": "{run}/checkpoints"},
        "timeout": "2m",
    }  # fmt: skip
    asserted = [{"completed": {"steps": 12}}, {"restarts": {"max": 0}}]
    path.write_text(yaml.safe_dump({"scenario": "by-hand", "job": job, "assert": asserted}))
    return path


@pytest.fixture
def node(tmp_path: Path, scenario: Path) -> Iterator[Start]:
    """Start `torchaos exec` as a scheduler would, on a node of this machine; what is left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(index: int, *command: str, **env: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "torchaos.harness", "exec", "--run", str(tmp_path / "run")]
        argv += [*(["--scenario", str(scenario)] if index == 0 else []), "--", *command]
        bin_ = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        whole = {**os.environ, "PATH": bin_, "SLURM_NODEID": str(index), **env}
        started.append(
            subprocess.Popen(
                argv,
                env=whole,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _said(process: subprocess.Popen[str], timeout_s: float = 120.0) -> str:
    return process.communicate(timeout=timeout_s)[0]


def test_each_node_has_its_part(tmp_path: Path, node: Start) -> None:
    """The command sees the agent's plan and its node; its output goes on and into a log of its own, its exit code too;
    a node that is not the first waits for the run directory, and a second submission is told apart."""
    script = "echo node $TORCHAOS_NODE in $(dirname $TORCHAOS_PLAN); exit $((3 * TORCHAOS_NODE))"
    second, first = node(1, "sh", "-c", script), node(0, "sh", "-c", script)
    run = RunDir(tmp_path / "run")
    assert f"node 1 in {run.agent_plan.parent}\n" in _said(second)
    assert f"node 0 in {run.agent_plan.parent}\n" in _said(first)
    assert (first.returncode, second.returncode) == (0, 3)
    again = node(0, "sh", "-c", "exit 4")
    _said(again)
    assert again.returncode == 4
    exits = [(e.data["submission"], e.data["node"], e.data["exit_code"]) for e in _of(run, Kind.NODE_EXITED)]
    assert sorted(exits) == [(0, 0, 0), (0, 1, 3), (1, 0, 4)]
    assert [(e.data["submission"], e.data["exit_code"]) for e in _of(run, Kind.JOB_EXITED)] == [(0, 0), (1, 4)]
    assert sorted(path.name for path in run.logs.iterdir()) == ["job-0.log", "job-0.node1.log", "job-1.log"]


def test_signals_reach_the_command(tmp_path: Path, node: Start) -> None:
    """What a scheduler sends is passed on, and the command's own end is what is reported."""
    process = node(0, "sh", "-c", "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert _said(process) == "told\n"
    assert process.returncode == 9


@pytest.mark.job
def test_a_job_that_nobody_of_ours_started(tmp_path: Path, node: Start) -> None:
    """Two nodes run torchrun each; the record that they leave is judged as any other: it passes, with the ranks of both
    nodes in it, in attempts that are counted by rounds."""
    jobs = Path(__file__).parents[2] / "scenarios" / "jobs" / "gpt_ddp.py"
    command = [
        "torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "by-hand",
        "--rdzv-endpoint", f"localhost:{_free_port()}", str(jobs), "--steps", "12",
        "--checkpoint-dir", "{run}/checkpoints",
    ]  # fmt: skip
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    nodes = [node(index, *command, PET_RDZV_CONF=f"is_host={int(not index)}", **env) for index in (0, 1)]
    said = [_said(one, 170.0) for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0], said
    run = RunDir(tmp_path / "run")
    ups = {(e.rank, e.data["node"], e.attempt) for e in _of(run, Kind.RANK_UP)}
    assert {node for _, node, _ in ups} == {0, 1}
    assert {(rank, attempt) for rank, _, attempt in ups} == {(0, 0), (1, 0)}
    clock = min(_of(run, Kind.CLOCK), key=lambda event: float(event.data["error_s"]))
    assert abs(clock.data["offset_s"]) <= clock.data["error_s"] + 0.001 < 1.0  # it is one machine
    result = judge(run)
    assert result.verdict is Verdict.PASSED, result.reason


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _of(run: RunDir, kind: Kind) -> list[Event]:
    return [event for event in read_events(run.events) if event.kind is kind]


def test_offsets_are_measured(tmp_path: Path) -> None:
    """Node 1's clock is 1,234.5 s ahead of node 0's: what is measured says so, within the error that it names."""
    told: list[dict[str, Any]] = []
    tell: Any = lambda _kind, data: told.append(dict(data))  # noqa: E731
    zero = Clock(tmp_path / "clock", 0, tell)
    one = Clock(tmp_path / "clock", 1, tell, lambda: time.monotonic() + 1234.5)
    zero.start()
    one.start()
    end = time.monotonic() + 60
    while not told:
        assert time.monotonic() < end, "no offset was measured"
        time.sleep(0.01)
    one.stop()
    zero.stop()
    assert told[0]["node"] == 1
    assert told[0]["offset_s"] == pytest.approx(-1234.5, abs=told[0]["error_s"] + 1e-4)
    assert told[0]["error_s"] < 1.0


def test_events_are_merged_by_one_clock(tmp_path: Path) -> None:
    """What a rank of node 1 did between two things of node 0 is read in between, whatever the clocks said, also as they
    drift; what nobody measured stays."""
    zero, one = EventFile(tmp_path / "node0.jsonl", "node0"), EventFile(tmp_path / "node1.jsonl", "node1")
    rank = EventFile(tmp_path / "rank1-a0-p9.jsonl", "rank1-a0-p9", 1, 0)
    note = {"text": "x"}
    zero.emit(Kind.NOTE, note, mono_s=10.0)
    one.emit(Kind.CLOCK, {"node": 1, "offset_s": -1000.0, "error_s": 0.001}, mono_s=1005.0)
    one.emit(Kind.CLOCK, {"node": 1, "offset_s": -1001.0, "error_s": 0.001}, mono_s=1065.0)
    rank.emit(Kind.AGENT_STARTED, {**dict.fromkeys(FIELDS[Kind.AGENT_STARTED]), "pid": 9, "python": "", "hooks": [],
                                   "node": 1}, mono_s=1011.0)  # fmt: skip
    rank.emit(Kind.NOTE, note, mono_s=1071.0)
    zero.emit(Kind.NOTE, note, mono_s=12.0)
    for file in (zero, one, rank):
        file.close()
    found = [(event.source, event.mono_s) for event in read_events(tmp_path) if event.kind is not Kind.CLOCK]
    assert found == [("node0", 10.0), ("rank1-a0-p9", 11.0), ("node0", 12.0), ("rank1-a0-p9", 70.0)]
    alone = [Event(Kind.NOTE, "rank1", 0, 0.0, 5.0, data=note)]
    assert list(map(Clocks(alone).aligned, alone)) == alone


def test_equal_pids_on_two_nodes_are_two_processes(tmp_path: Path, scenario: Path) -> None:
    """Rank 0 is killed on node 0 and has the pid and start time of rank 1 on node 1, as pods often have: nothing says
    that rank 1 died. Its pid is printed with its node."""
    plan = make_plan(load(scenario), scenario, 0)
    zero, one = EventFile(tmp_path / "node0.jsonl", "node0"), EventFile(tmp_path / "node1.1.jsonl", "node1.1")
    rank = EventFile(tmp_path / "rank1-a0-p27.jsonl", "rank1-a0-p27", 1, 0)
    for node, file in enumerate((zero, one)):
        file.emit(Kind.NODE_STARTED, {"submission": 0, "node": node, "pid": 20})
    same = {"pid": 27, "start_ticks": 299337}
    started: dict[str, Any] = {
        **dict.fromkeys(FIELDS[Kind.AGENT_STARTED]),
        **same,
        "python": "",
        "hooks": [],
        "node": 1,
    }
    rank.emit(Kind.AGENT_STARTED, started)
    rank.emit(Kind.APPLYING, {"fault": "kill", "phase": None, "global_step": 5, **same})
    zero.emit(Kind.RANK_EXITED, {**same, "exit_code": -9}, rank=0, attempt=0)
    record = Record(plan, tuple(read_events(tmp_path)), {})
    assert died(record, "kill", -9) is None
    assert record.history.attempts[0].ranks[1].exited_s is None
    one.emit(Kind.RANK_EXITED, {**same, "exit_code": -9}, rank=1, attempt=0)
    for file in (zero, one, rank):
        file.close()
    record = Record(plan, tuple(read_events(tmp_path)), {})
    proof = died(record, "kill", -9)
    assert proof is not None
    assert proof.what == "pid 27 (node 1) ended with exit code -9, the kernel says"
    assert record.history.attempts[0].ranks[1].exited_s is not None


def test_which_node_it_is(tmp_path: Path) -> None:
    """As the scheduler says; where none does, the error says what to write."""
    assert node_index({"SLURM_NODEID": "3"}) == 3
    assert node_index({"JOB_COMPLETION_INDEX": "2", "PET_NODE_RANK": "auto"}) == 2
    with pytest.raises(UsageError, match=r"write --node, or set one of SLURM_NODEID"):
        node_index({})


def test_exec_injects_nothing(tmp_path: Path, node: Start, scenario: Path) -> None:
    """A scenario with faults is refused, before there is a run directory."""
    raw = yaml.safe_load(scenario.read_text())
    raw["faults"] = [{"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 5}}]
    scenario.write_text(yaml.safe_dump(raw))
    process = node(0, "true")
    assert "exec records, and injects nothing; use `torchaos run`" in _said(process)
    assert process.returncode == 3
    assert not (tmp_path / "run").exists()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory as node 0 makes it."""
    run = RunDir(tmp_path / "run").create()
    AgentPlan("by-hand", str(run.events), ()).write(run.agent_plan)
    return run


@pytest.fixture
def missed() -> Iterator[list[int]]:
    """The numbers of the signals that nobody of ours took."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_comes_too_early_is_passed_on(
    run: RunDir, missed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a scheduler sends while the command is being started reaches it all the same."""
    real: Any = vars(node_exec)["start"]

    def start(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(*args)

    monkeypatch.setattr(node_exec, "start", start)
    assert NodeExec(run, 0, ["sleep", "5"])() == -signal.SIGUSR1
    assert missed == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert missed == [signal.SIGUSR1], "afterwards signals mean what they meant before"


def test_nobody_is_sent_a_signal_once_the_command_is_over(
    run: RunDir, missed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid may be another process's by then: what comes late goes to nobody."""
    kill, sent = os.kill, list[int]()
    real: Any = vars(node_exec)["start"]

    def start(*args: Any) -> Any:
        found = real(*args)
        drain = found.command.drain

        def late(timeout_s: float) -> bool:
            monkeypatch.setattr(os, "kill", lambda pid, _number: sent.append(pid))
            kill(os.getpid(), signal.SIGUSR1)
            return bool(drain(timeout_s))

        found.command.drain = late
        return found

    monkeypatch.setattr(node_exec, "start", start)
    assert NodeExec(run, 0, ["true"])() == 0
    assert (sent, missed) == ([], [])


def test_the_command_ends_with_its_wrapper(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the wrapper, as a journal on a disk that is full: no job is left that nobody waits for."""
    pids: list[int] = []
    one = NodeExec(run, 0, ["sleep", "600"])
    emit = one._journal.emit

    def full(kind: Kind, data: Any, **more: Any) -> Any:
        if kind is Kind.NODE_STARTED:
            pids.append(data["pid"])
            raise OSError("no space left")
        return emit(kind, data, **more)

    monkeypatch.setattr(one._journal, "emit", full)
    with pytest.raises(OSError, match="no space left"):
        one()
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (len(pids), left) == (1, [])


def test_a_directory_that_was_left_half_made_is_finished(tmp_path: Path, scenario: Path) -> None:
    """Node 0 was killed while it made the run directory; started again, it makes the rest. What is another's is not
    written into."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir(0o700)
    run.pages.parent.mkdir(0o700)
    run.plan.write_text("{")
    make(run, scenario)
    assert AgentPlan.read(str(run.agent_plan)).events == str(run.events)
    assert run.check() is run
    other = RunDir(tmp_path / "project")
    (other.root / "src").mkdir(parents=True)
    with pytest.raises(UsageError, match="contains src, so it is no run directory"):
        make(other, scenario)
    file = RunDir(tmp_path / "file")
    file.root.touch()
    with pytest.raises(UsageError, match="the run directory can't be made"):
        make(file, scenario)
    assert [path.name for path in other.root.iterdir()] == ["src"]


@pytest.mark.parametrize("which", ["run", "run/agent", "run/agent/plan.json"])
def test_what_a_link_leads_to_is_not_trusted(tmp_path: Path, scenario: Path, run: RunDir, which: str) -> None:
    """In a place that others share, whoever made DIR first would choose what the ranks read: the folder and the plan in
    it must be this user's own, and no link."""
    (tmp_path / which).rename(tmp_path / "theirs")
    (tmp_path / which).symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="it is a link"):
        NodeExec(run, 1, ["true"])
    if which == "run":
        (tmp_path / "theirs/agent/plan.json").unlink()
        with pytest.raises(UsageError, match="it is a link"):
            make(run, scenario)


def test_another_user_s_directory_is_not_trusted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the folder is no link, and belongs to somebody else."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="another user's"):
        NodeExec(run, 1, ["true"])


def test_a_node_that_died_before_its_clock_was_measured() -> None:
    """Its events are merged by its wall clock, so an undo after its death comes after what it did. A node of the same
    boot is not shifted."""

    def event(source: str, wall_s: float, mono_s: float, kind: Kind = Kind.NOTE, **data: Any) -> Event:
        return Event(kind, source, 0, wall_s, mono_s, None, None, None, data)

    told = [
        event("harness", 500.0, 100.0), event("node0", 501.0, 900.0), event("node1", 502.0, 2_000_102.0),
        event("node2", 503.0, 103.2), event("node0", 504.0, 903.0, Kind.CLOCK, node=0, offset_s=-799.5, error_s=0.1),
    ]  # fmt: skip
    clocks = Clocks(told)
    assert [round(clocks.aligned(one).mono_s, 3) for one in told] == [100.0, 100.5, 102.0, 103.2, 103.5]


def test_a_pipe_starts_without_large_libraries() -> None:
    """A pipe to the agent of each node is started by every run, and again when one dies. An agent is started on each
    node; it needs the libraries, but not the grammar of scenarios."""
    code = "import sys; import torchaos.harness.{}; print(sorted({} & sys.modules.keys()))"
    for module, unwanted in (
        ("cli.node", {"numpy", "pydantic", "yaml", "torchaos.harness.rollback.handles"}),
        ("running.nodes.node_exec", {"torchaos.harness.scenario.grammar", "torchaos.harness.running.planner"}),
        ("running.launchers.node_channel", {"torchaos.harness.scenario.grammar", "torchaos.harness.running.planner"}),
    ):
        argv = [sys.executable, "-c", code.format(module, unwanted)]
        assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "[]\n"
