"""What holds for all tests: nothing of them goes into the user's own state, nor does anything of the user's come in."""

from __future__ import annotations

import os
from collections.abc import Iterator

import docker_engine as engines
import pytest

HOST = {"undo", "network", "deaths", "test_storage", "test_storage_fill"}  # folders and files


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side, those that need a container engine share one, and those that change or look at what
    the host has (mounts, namespaces, devices) take turns."""
    for item in items:
        if "docker_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("docker"))
        elif HOST & {*item.path.parts, item.path.stem}:
            item.add_marker(pytest.mark.xdist_group("host"))


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
