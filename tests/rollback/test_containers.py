"""The handles of a run's objects in a Docker engine, with a real engine: what they restore, and what they do not
touch."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_engine import network_of, sleeper

from torchaos.harness.host.cluster_tools import EngineError, engine
from torchaos.harness.rollback.container_handles import Container, Containers, DockerImage, DockerNetwork, limits_of
from torchaos.harness.rollback.reaper_client import undo_from_log

LIMITS = {"cpu_period": 100_000, "cpu_quota": -1, "mem_limit": 1 << 33, "memswap_limit": 1 << 33}


class Made:
    """What a test makes in the engine; all of it is removed with the test."""

    def __init__(self, where: str, client: Any) -> None:
        self.where, self.client = where, client
        self.run_id = f"containers-{os.getpid()}-{time.monotonic_ns()}"

    def container(self, part: Any, one: str, **good: Any) -> Container:
        return Container(self.where, self.run_id, one, part, good)

    def look(self, one: str) -> Any:
        return self.client.inspect_container(one)

    def clear(self) -> None:
        for kind in (Containers, DockerNetwork, DockerImage):
            kind(self.where, self.run_id).undo()


@pytest.fixture
def made(docker_engine: str) -> Iterator[Made]:
    with engine(docker_engine) as client:
        one = Made(docker_engine, client)
        yield one
        one.clear()


def test_the_network_comes_back_with_the_same_address(made: Made) -> None:
    """A container that was taken off its network gets it back with the address that it had."""
    network = network_of(made.client, made.run_id)
    one = sleeper(made.client, made.run_id, network)
    before = next(iter(made.look(one)["NetworkSettings"]["Networks"].values()))
    handle = made.container("network", one, network=network, address=before["IPAddress"])
    assert handle.is_undone()
    made.client.disconnect_container_from_network(one, network)
    assert not handle.is_undone()
    for _again in range(2):
        handle.undo()
        assert handle.is_undone()
    (now,) = made.look(one)["NetworkSettings"]["Networks"].values()
    assert (now["NetworkID"], now["IPAddress"]) == (network, before["IPAddress"])


def test_limits_come_back_as_they_were(made: Made) -> None:
    """CPU and memory have the limits again that the container was made with."""
    one = sleeper(made.client, made.run_id, limits=LIMITS)
    handle = made.container("limits", one, **limits_of(made.look(one)))
    assert handle.good == LIMITS
    made.client.update_container(one, cpu_quota=20_000, mem_limit=1 << 26, memswap_limit=1 << 26)
    assert not handle.is_undone()
    for _again in range(2):
        handle.undo()
        assert handle.is_undone()
    assert limits_of(made.look(one)) == LIMITS


def test_a_strangers_container_is_left_alone(made: Made) -> None:
    """One that does not bear the run's label is neither removed nor changed, even where a handle names it."""
    one = sleeper(made.client, made.run_id, owner="somebody")
    try:
        made.client.pause(one)
        handle = made.container("running", one)
        for act in (handle.undo, handle.is_undone):
            with pytest.raises(EngineError, match="does not have the run's label"):
                act()
        Containers(made.where, made.run_id).undo()
        assert made.look(one)["State"]["Paused"]
    finally:
        made.client.remove_container(one, force=True)


@pytest.mark.parametrize(
    "part", ["running", *(pytest.param(one, marks=pytest.mark.long) for one in ("network", "limits"))]
)
def test_a_container_that_is_gone_needs_nothing(made: Made, part: Any) -> None:
    """One that has ended, or was removed, counts as set right."""
    one = sleeper(made.client, made.run_id)
    made.client.kill(one)
    made.client.wait(one)
    handle = made.container(part, one, network="gone", address="10.0.0.1")
    handle.undo()
    assert handle.is_undone()
    made.client.remove_container(one, force=True)
    handle.undo()
    assert handle.is_undone()


def test_a_paused_container_is_removed(made: Made) -> None:
    """Removing waits for no process that is frozen."""
    made.client.pause(sleeper(made.client, made.run_id))
    handle = Containers(made.where, made.run_id)
    handle.undo()
    assert handle.is_undone()


@pytest.mark.parametrize("kind", [Containers, DockerNetwork, DockerImage])
def test_an_engine_that_is_not_there(kind: Any, tmp_path: Path) -> None:
    """Without an engine nobody knows what is left, so nothing counts as taken back."""
    handle = kind(f"unix://{tmp_path / 'nosuch.sock'}", "a-run")
    for act in (handle.undo, handle.is_undone):
        with pytest.raises(OSError, match="does not answer"):
            act()
    with pytest.raises(ValueError, match="without its id"):
        dataclasses.replace(handle, run_id="")


def test_an_engine_that_hangs_is_reported(tmp_path: Path) -> None:
    """A socket that takes requests and says nothing is given up in time, with the reason."""
    path = tmp_path / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        with pytest.raises(OSError, match=r"the Docker engine at .*deaf\.sock"), engine(f"unix://{path}", 0.3):
            pass


_HARNESS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from docker_engine import network_of, sleeper
from torchaos.harness.host.cluster_tools import engine
from torchaos.harness.rollback.reaper_client import ReaperClient
from torchaos.harness.rollback.container_handles import Container, Containers, DockerImage, DockerNetwork
folder, run, where = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
reaper = ReaperClient.start(folder, run)
kinds = DockerImage, DockerNetwork, Containers
reaper.record_undo("launcher", [kind(where, run) for kind in kinds], owner="launcher")
with engine(where) as client:
    one = sleeper(client, run, network_of(client, run))
    reaper.record_undo("pause", [Container(where, run, one, "running")], owner="pause")
    client.pause(one)
    print("made", flush=True)
    if sys.argv[5] == "both":
        os.kill(reaper.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("dies", ["harness", pytest.param("both", marks=pytest.mark.long)])
def test_nothing_is_left_when_the_harness_is_killed(made: Made, tmp_path: Path, dies: str) -> None:
    """SIGKILL in the middle of a fault: the reaper takes container, network and image away; where that is killed, too,
    whoever undoes from the log does."""
    (tmp_path / "undo").mkdir()
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", _HARNESS, tmp_path, made.run_id, made.where, support, dies],
        stdout=subprocess.PIPE, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "made\n")
    handles = [kind(made.where, made.run_id) for kind in (Containers, DockerNetwork, DockerImage)]
    if dies == "both":
        assert not any(handle.is_undone() for handle in handles)
        assert all(undone.verified for undone in undo_from_log(tmp_path))
    end = time.monotonic() + 60
    while left := [handle.kind for handle in handles if not handle.is_undone()]:
        assert time.monotonic() < end, f"after 60 s these are left: {left}"
        time.sleep(0.05)
