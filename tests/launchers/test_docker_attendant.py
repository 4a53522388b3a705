"""The process that represents a node's command in the harness's process tree, with a simulated engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchaos.harness.host.cluster_tools import NODE, RUN, EngineError
from torchaos.harness.running.launchers import docker_shim as attendant

pytest.importorskip("docker")

CONFIG = {
    "engine": "unix:///nowhere", "env": [], "set": {}, "mounts": [], "network": "net", "address": "10.0.0.1",
    "host": {}, "create": {"image": "i", "name": "the-node", "labels": {RUN: "a-run", NODE: "1"}},
}  # fmt: skip


class MadeUpEngine:
    """Has containers {id: labels}; ends the new one with 0. `at` says where SIGTERM comes."""

    def __init__(self, at: str = "", **containers: dict[str, str]) -> None:
        self.at, self.there, self.state = at, containers, "none"
        self.told: list[str] = []

    def containers(self, all: bool, filters: dict[str, list[str]]) -> list[dict[str, str]]:
        wanted = {tuple(label.split("=", 1)) for label in filters["label"]}
        return [{"Id": one} for one, labels in self.there.items() if wanted <= labels.items()]

    def remove_container(self, name: str, force: bool, v: bool) -> None:
        from docker.errors import NotFound

        if self.there.pop({"the-node": "strangers"}.get(name, name), None) is None:
            raise NotFound(name)

    def create_container(self, **config: Any) -> dict[str, str]:
        self.state = "created"
        return {"Id": "new"}

    def create_host_config(self, *said: Any, **config: Any) -> None: ...

    create_endpoint_config = create_networking_config = create_host_config

    def attach(self, created: str, **how: Any) -> Iterator[bytes]:
        yield b""
        self.state = "ended"
        self._signal("the end")

    def start(self, created: str) -> None:
        self._signal("the start")
        self.state = "running"

    def kill(self, created: str, signal: str) -> None:
        if self.state != "running":
            raise EngineError(f"container {created} is not running")
        self.told.append(signal)

    def wait(self, created: str, timeout: None) -> dict[str, int]:
        return {"StatusCode": 0}

    def _signal(self, place: str) -> None:
        if self.at == place:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the attendant with that engine. A SIGTERM that it does not take ends no test."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)

    def run_it(made_up: MadeUpEngine) -> int:
        @contextmanager
        def engine(where: str, timeout_s: float = 1.0) -> Iterator[MadeUpEngine]:
            yield made_up

        monkeypatch.setattr(attendant, "engine", engine)
        return attendant.main(CONFIG, ["true"])

    yield run_it
    signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_when_all_is_over(run: Any) -> None:
    """The engine refuses to signal a container that has ended: the node's exit code is the container's all the same."""
    assert run(MadeUpEngine(at="the end")) == 0


def test_a_signal_that_comes_before_the_start(run: Any) -> None:
    """It is handed on, once, as soon as there is somebody to take it."""
    made_up = MadeUpEngine(at="the start")
    assert run(made_up) == 0
    assert made_up.told == ["SIGTERM"]


def test_only_the_nodes_own_container_is_replaced(run: Any) -> None:
    """What the node was before is removed; what bears its name and not the run's label is somebody else's."""
    mine = {RUN: "a-run", NODE: "1"}
    made_up = MadeUpEngine(before=mine, strangers={}, other={**mine, NODE: "2"}, another={**mine, RUN: "b-run"})
    run(made_up)
    assert made_up.there.keys() == {"strangers", "other", "another"}
