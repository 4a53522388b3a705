"""The folder that only one node uses."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchaos.harness.cli.node import recover as recover_node
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import ENV_RUN_ID, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback import orphaned_runs, undo_log
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running.launchers.node_channel import await_place, packed, receive
from torchaos.harness.running.nodes import node_exec
from torchaos.harness.running.nodes.agent_socket import address_of, make_place, place_of
from torchaos.harness.running.nodes.node_agent import NodeFaults


def test_a_socket_in_a_deep_folder(tmp_path: Path) -> None:
    """A socket can be made and reached below a path that is longer than the 107 bytes of a socket's address."""
    path = tmp_path / ("deep" * 30) / "socket"
    path.parent.mkdir()
    with pytest.raises(OSError, match="too long"):
        socket.socket(socket.AF_UNIX).bind(str(path))
    server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with server, client:
        with address_of(path) as address:
            server.bind(address)
        server.listen()
        with address_of(path) as address:
            client.connect(address)
        server.accept()[0].sendall(b"here")
        assert client.recv(4) == b"here"


_DIES = """
import os, signal, sys
from torchaos.harness.running.nodes.agent_socket import make_place
from torchaos.harness.rollback import undo_log as open_runs, orphaned_runs
from torchaos.harness.rollback.reaper_client import ReaperClient
from torchaos.harness.rollback.handles import JobProcesses

reaper = ReaperClient.start(make_place("run-1.node0").root, "run-1.node0")
if sys.argv[1:]:
    reaper.record_undo("job", [JobProcesses("run-1.node0")], owner="job")
os.kill(reaper.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_agent_undoes_what_the_dead_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent and its reaper died at once, as when a node goes down: the next agent on the node undoes what is in
    their undo log, says so, and does it only once. The folder of an agent that lives stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TMPDIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    with subprocess.Popen(["sleep", "20"], env={**os.environ, ENV_RUN_ID: "run-1.node0"}) as stray:
        assert subprocess.run([sys.executable, "-c", _DIES, "guards"], check=False).returncode == -signal.SIGKILL
        living = ReaperClient.start(make_place("run-2.node0").root, "run-2.node0")
        living.record_undo("job", [JobProcesses("run-2.node0")], owner="job")
        journal = Journal(tmp_path, "node0")
        assert node_exec.undo_for_the_dead(journal) == ""
        assert node_exec.undo_for_the_dead(journal) == ""
        assert stray.wait(timeout=300) in (-signal.SIGTERM, -signal.SIGKILL)
    notes = [event.data["text"] for event in journal.snapshot() if event.kind is Kind.NOTE]
    assert notes == ["what run-1.node0 left on this node is undone"]
    assert not place_of("run-1.node0").root.exists()
    assert place_of("run-2.node0").root.exists()
    living.close()
    journal.close()


def test_those_that_died_with_nothing_to_undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent and its reaper died when nothing was left to undo: their run is not in the registry any more, after
    another process has looked."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TMPDIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert subprocess.run([sys.executable, "-c", _DIES], check=False).returncode == -signal.SIGKILL
    assert len(undo_log.entries()[0]) == 1
    assert node_exec.recover(place_of("run-1.node0").root) == ""
    assert undo_log.entries() == ([], [])
    assert not place_of("run-1.node0").root.exists()


def test_those_that_died_before_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent and its reaper died before the first line of the undo log was whole, so nothing was ever changed: their
    folder is removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for line in ("", '{"run_id": "run-5'):
        (make_place("run-5.node0").undo / "undo.jsonl").write_text(line)
        assert recover_node("run-5.node0") == 0
        assert not place_of("run-5.node0").root.exists()


_LIVES = """
import sys
from torchaos.harness.running.nodes.agent_socket import make_place
from torchaos.harness.rollback.reaper_client import ReaperClient
from torchaos.harness.rollback.handles import JobProcesses

reaper = ReaperClient.start(make_place("run-4.node0").root, "run-4.node0")
reaper.record_undo("job", [JobProcesses("run-4.node0")], owner="job")
print("up", flush=True)
sys.stdin.read()
reaper.close()
"""


def test_an_agent_that_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchaos node --recover` comes while the agent still undoes everything: it waits for the agent's end, and does
    not say that something is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TMPDIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", _LIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"up\n"
        looks: list[Any] = []
        controller = agent.stdin

        def look(folders: Any) -> Any:
            looks.append(find(folders))
            if len(looks) == 2:  # nobody has given up after the first look
                controller.close()
            return looks[-1]

        find = orphaned_runs.find
        monkeypatch.setattr(orphaned_runs, "find", look)
        assert recover_node("run-4.node0") == 0
        assert agent.wait(timeout=300) == 0
    assert len(looks) > 2
    assert undo_log.entries() == ([], [])
    assert not place_of("run-4.node0").root.exists()


def test_a_reaper_that_dies_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reaper of a node dies when it has made its entry in the registry, and before it guards anything: nothing is
    injected on that node, and the entry is removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TMPDIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    guard = ReaperClient.record_undo

    def dead(reaper: ReaperClient, *given: Any, **more: Any) -> None:
        os.kill(reaper.pid, signal.SIGKILL)
        guard(reaper, *given, **more)

    monkeypatch.setattr(ReaperClient, "record_undo", dead)
    job = SimpleNamespace(cwd=str(tmp_path), checkpoints=None, timeout_s=60.0)
    plan: Any = SimpleNamespace(faults=(), job=job)
    part: Any = SimpleNamespace()
    journal = Journal(tmp_path, "node0")
    with pytest.raises(UndoError):
        NodeFaults(plan, RunDir(tmp_path), make_place("run-3.node0"), "run-3.node0", 0, part, journal)
    assert undo_log.entries() == ([], [])
    journal.close()


def test_new_pods_do_not_read_the_addresses_of_the_pods_before(tmp_path: Path) -> None:
    """Pods that share the run directory have the same names in each submission: a pod of the second submission waits
    for its own addresses, although those of the first submission are there."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.plan.write_text("{}")
    run.agent_plan.write_text("{}")
    assert receive(run.root, io.BytesIO(packed(run.root, 1, ["10.0.0.2", "10.0.0.3"])))
    assert await_place(run.root, 0, 0.0) == (1, ["10.0.0.2", "10.0.0.3"])
    with pytest.raises(UsageError, match="did not hand over"):
        await_place(run.root, 1, 0.0)
    assert receive(run.root, io.BytesIO(packed(run.root, 1, ["10.0.0.4", "10.0.0.5"], submission=1)))
    assert await_place(run.root, 1, 0.0) == (1, ["10.0.0.4", "10.0.0.5"])


def test_a_container_that_is_started_again(tmp_path: Path) -> None:
    """An operator may start a container again that has ended with an error. The second start does not run the job once
    more, and does not wait for a run that nobody hands over."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.plan.write_text("{}")
    run.agent_plan.write_text("{}")
    assert receive(run.root, io.BytesIO(packed(run.root, 0, ["10.0.0.2"])))
    assert await_place(run.root, 0, 0.0) == (0, ["10.0.0.2"])
    with pytest.raises(UsageError, match="this container was started again"):
        await_place(run.root, 0, 60.0)
