"""Fixtures for all tests: no test writes into the user's own state or reads from it."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import needs
import pytest
import warm
from hypothesis import HealthCheck, settings

# A busy machine is slow at times: no draw has a time limit, and no test fails for a slow draw.
settings.register_profile("busy", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

HOST = {
    "rollback",
    "network",
    "deaths",
    "test_docker",
    "test_docker_deaths",
    "test_storage",
    "test_storage_fill",
}  # folders and files

# What takes longest of `make test-all` begins first, so that no worker is left with one of them at the end.
LONGEST = {"test_teeth", "test_process_faults", "test_conditions", "test_oracle", "test_docker", "test_pods"}


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts tests in the background, or nohup, ignores signals in them, and every process that a test
    starts would inherit that. A handler of Python's ends with exec; so they have the default, and these tests go on."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
    warm.share()  # before xdist starts the processes that run the tests
    gc.disable()  # a sixth of the time in which thousands of tests are collected


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # tests make many objects and keep few
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Gives each test its markers before -m chooses, and afterwards puts the chosen ones into an order in which jobs,
    which wait a lot, run beside the tests that compute, and none of them is the last."""
    for item in items:
        if needs.of_the_system(item):
            item.add_marker("system")
        if needs.is_slow(item):
            item.add_marker("slow")
    yield
    items.sort(key=lambda item: (item.path.stem not in LONGEST, item.get_closest_marker("job") is None))
    if "worksteal" in getattr(config, "workerinput", {}).get("mainargv", ()):
        items[:] = dealt(items, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, those that would wait for one another (`_taking_turns`) go to one worker, too."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            return "host" if is_of_the_host(file) else str(file)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """With --dist worksteal, each worker begins with an equal part of the tests: first with its share of the jobs.
    Those of one file stay together, because they may look at the same job."""
    jobs = [item for item in items if item.get_closest_marker("job")]
    others = iter([item for item in items if not item.get_closest_marker("job")])
    files = list(dict.fromkeys(item.path for item in jobs))
    parts: list[pytest.Item] = []
    for worker in range(workers):
        size = (len(items) - len(parts)) // (workers - worker)
        own = [item for item in jobs if files.index(item.path) % workers == worker]
        parts += [*own, *islice(others, size - len(own))]
    return parts


def is_of_the_host(file: Path) -> bool:
    return bool(HOST & {*file.parts, file.stem})


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        needs.need(*mark.args)


@pytest.fixture(autouse=True)
def _taking_turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where tests run side by side, those that change or look at what the host has (mounts, namespaces, devices,
    containers) take turns."""
    if "docker_engine" not in request.fixturenames and not is_of_the_host(request.path):
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
