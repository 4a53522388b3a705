"""Fixtures for all tests: no test writes into the user's own state or reads from it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import docker_engine as engines
import pytest

HOST = {"undo", "network", "deaths", "test_storage", "test_storage_fill"}  # folders and files


@pytest.fixture(autouse=True)
def _taking_turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where tests run side by side, those that change or look at what the host has (mounts, namespaces, devices,
    containers) take turns."""
    if "docker_engine" not in request.fixturenames and not HOST & {*request.path.parts, request.path.stem}:
        yield
        return
    with open(tmp_path_factory.getbasetemp().parent / "host.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an engine that is the session's own."""
    if lacks := engines.missing():
        pytest.skip(f"no {lacks}")
    with engines.private_engine(tmp_path_factory.mktemp("e")) as where:
        yield where


@pytest.fixture(scope="session", autouse=True)
def _state_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where the runs of this session are registered, also those of commands that tests start."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
