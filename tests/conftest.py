"""Fixtures for all tests: no test writes into the user's own state or reads from it."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator

import needs
import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow at times: no draw has a time limit, and no test fails for a slow draw.
settings.register_profile("busy", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Files with long jobs come first, so that no worker is left with one of them at the end.
LONGEST = {"test_teeth", "test_process_faults", "test_conditions", "test_oracle"}

HOST = {"rollback", "network", "deaths", "test_storage", "test_storage_fill"}  # folders and files


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts tests in the background, or nohup, ignores signals in them, and every process that a test
    starts would inherit that. A handler of Python's ends with exec; so they have the default, and these tests go on."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if needs.of_the_system(item):
            item.add_marker("system")
        if needs.is_slow(item):
            item.add_marker("slow")
    # Jobs, which wait a lot, run beside the tests that compute, and none of them is the last.
    items.sort(key=lambda item: (item.get_closest_marker("job") is None, item.path.stem not in LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        needs.need(*mark.args)


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
    import docker_engine as engines  # half a second, in each process that runs tests

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
