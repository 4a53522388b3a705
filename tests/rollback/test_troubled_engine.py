"""Undoes a run's objects in an engine that is slow, or that still carries out a request of a dead process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.host.cluster_tools import NODE, RUN, EngineError, of_run
from torchaos.harness.interfaces import JobSpec
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback import container_handles, reaper
from torchaos.harness.rollback.container_handles import Containers
from torchaos.harness.running.launchers.docker import Docker

docker_errors = pytest.importorskip("docker.errors")
requests_errors = pytest.importorskip("requests.exceptions")


class Slow:
    """Has containers, by id with their nodes; `remove` is what the engine does when one is to go."""

    timeout = 20.0

    def __init__(self, remove: Callable[[str], object] = lambda one: None, **there: int) -> None:
        self.there, self.looks, self._remove = there, 0, remove
        self.later: dict[int, dict[str, int]] = {}  # what is there from which look on
        self.longest_s = 0.0  # from now until a request is given up

    def containers(self, all: bool, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        assert filters == of_run("a-run")
        self.looks += 1
        self.there |= self.later.pop(self.looks, {})
        return [{"Id": one, "Labels": {RUN: "a-run", NODE: str(node)}} for one, node in self.there.items()]

    def remove_container(self, name: str, force: bool, v: bool) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() + self.timeout)
        self._remove(name)
        del self.there[name]


@pytest.fixture
def in_(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Containers]:
    """The handle of a run's containers in that engine. Sleeps between looks are short."""
    monkeypatch.setattr(container_handles, "_SETTLE_S", 0.01)

    def handle(slow: Slow, nodes: int = 0) -> Containers:
        @contextmanager
        def engine(where: str) -> Iterator[Slow]:
            try:
                yield slow
            except (docker_errors.DockerException, requests_errors.RequestException) as error:
                raise EngineError(str(error)) from error

        monkeypatch.setattr(container_handles, "engine", engine)
        return Containers("unix:///nowhere", "a-run", nodes)

    return handle


def test_one_that_does_not_go_keeps_no_other(in_: Callable[..., Containers], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers for the first one never in time: the others are removed, and then that is told."""

    def remove(one: str) -> None:
        if one == "a":
            raise requests_errors.ReadTimeout("no answer about a")

    monkeypatch.setattr(container_handles, "_END_S", 0.3)
    slow = Slow(remove, a=0, b=1, c=2)
    with pytest.raises(EngineError, match="no answer about a"):
        in_(slow).undo()
    assert slow.there.keys() == {"a"}


def test_one_that_goes_late(in_: Callable[..., Containers]) -> None:
    """A request that was not answered in time is made again."""
    tried: list[str] = []

    def remove(one: str) -> None:
        tried.append(one)
        if len(tried) < 3:
            raise requests_errors.ReadTimeout("no answer yet")

    slow = Slow(remove, a=0)
    in_(slow).undo()
    assert (tried, slow.there) == (["a"] * 3, {})


def test_all_go_at_once(in_: Callable[..., Containers]) -> None:
    """None waits for another one to be gone."""
    both = threading.Barrier(2, timeout=300)
    slow = Slow(lambda one: both.wait(), a=0, b=1)
    in_(slow).undo()
    assert slow.there == {}


def test_it_ends_before_the_executor_gives_it_up(
    in_: Callable[..., Containers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is left behind works beside the next handles: no request outlasts the end by more than a second."""
    assert container_handles._END_S + 2 < reaper.BOUND_S
    monkeypatch.setattr(container_handles, "_END_S", 2.0)
    slow, end = Slow(a=0), time.monotonic() + 2.0
    in_(slow).undo()
    assert slow.longest_s <= end + 1


def test_one_that_is_being_made(in_: Callable[..., Containers]) -> None:
    """Whoever was killed had asked the engine for node 1's container: it comes late, and is removed."""
    slow = Slow(a=0)
    slow.later[5] = {"b": 1}
    in_(slow, nodes=2).undo()
    assert (slow.there, slow.later) == ({}, {})


def test_nothing_is_waited_for_when_all_nodes_were_there(in_: Callable[..., Containers]) -> None:
    """A node that has its container is not getting another."""
    slow, began = Slow(a=0, b=1), time.monotonic()
    in_(slow, nodes=2).undo()
    assert time.monotonic() - began < container_handles._QUIET_S


def test_the_launcher_says_how_many_nodes_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without that nobody could tell whether one is still being made."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    spec = JobSpec(("true",), tmp_path, {ENV_RUN_ID: "a-run"}, tmp_path / "job-0.log", 0, 3)
    assert Containers("unix:///nowhere", "a-run", 3) in Docker().resources(spec)
