"""What a job leaves behind: processes with their ports, and shared memory, without those of other jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from torchaos.harness.interfaces import Need
from torchaos.harness.monitoring.observers import end_of_job
from torchaos.harness.monitoring.observers.end_of_job import Leftovers
from torchaos.harness.protocol.wire import start_ticks
from torchaos.harness.record.plan import Plan, PlannedJob

JOB = PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0, None)
PLAN = replace(Plan("made-up", "", 7, JOB, (), ()), collect=(Need.LEFTOVERS,))
CHILD = """
import mmap, os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
file = open(sys.argv[1], "w+b")
file.truncate(4096)
page = mmap.mmap(file.fileno(), 0)
file.close()
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(not os.access(end_of_job.SHARED, os.W_OK), reason="needs /dev/shm")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A place for an entry, taken away afterwards."""
    path = end_of_job.SHARED / f"torchaos-test-{os.getpid()}x"
    yield path
    path.unlink(missing_ok=True)


def never() -> bool:
    return False


def test_a_process_that_stays_is_told_with_its_port_and_its_memory(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it lives it is a leftover; once it is dead, what it had in shared memory still is."""
    monkeypatch.setattr(end_of_job, "GRACE_S", 0.2)
    members: dict[int, int] = {}
    left = Leftovers(PLAN, lambda: members)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    port = int(child.stdout.readline())
    members[child.pid] = start_ticks(child.pid) or 0
    left.start()
    found = left.take(True, never)
    assert found is not None
    (process,) = found["processes"]
    assert (process["pid"], process["ports"]) == (child.pid, [port])
    assert {"name": shared.name, "bytes": 4096, "of_job": True} in found["shared_memory"]
    members.clear()
    child.communicate()
    found = left.take(True, never)
    assert found is not None
    assert found["processes"] == []
    assert {"name": shared.name, "bytes": 4096, "of_job": True} in found["shared_memory"]


def test_what_another_made_at_the_same_time_is_not_the_jobs(shared: Path) -> None:
    """An entry that was there before is none of it, and a new one that no process of the job used is not said to be."""
    shared.write_bytes(b"old")
    before = Leftovers(PLAN, dict)
    before.start()
    found = before.take(True, never)
    assert found is not None
    assert shared.name not in [one["name"] for one in found["shared_memory"]]
    shared.unlink()
    after = Leftovers(PLAN, dict)
    after.start()
    shared.write_bytes(b"new")
    found = after.take(True, never)
    assert found is not None
    assert {"name": shared.name, "bytes": 3, "of_job": False} in found["shared_memory"]


def test_shared_memory_that_is_still_being_removed(shared: Path) -> None:
    """An entry that is removed within the grace time is not left: another program may just have ended."""
    left = Leftovers(PLAN, dict)
    left.start()
    shared.write_bytes(b"new")

    def removed() -> bool:
        shared.unlink(missing_ok=True)
        return False

    found = left.take(True, removed)
    assert found is not None
    assert shared.name not in [one["name"] for one in found["shared_memory"]]


def test_what_another_living_process_uses_is_not_the_jobs(shared: Path) -> None:
    """Shared memory that a process outside of the job still uses when the job is over is not left by the job."""
    left = Leftovers(PLAN, dict)
    left.start()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    child.stdout.readline()
    found = left.take(True, never)
    child.communicate()
    assert found is not None
    assert shared.name not in [one["name"] for one in found["shared_memory"]]


def test_nothing_is_looked_at_where_nobody_wants_it() -> None:
    """Without an assertion that needs it, for a job that was attached to, and for one that did not end by itself."""
    assert Leftovers(replace(PLAN, collect=()), dict).take(True, never) is None
    attached = replace(PLAN, job=replace(JOB, attach_pid=1))
    assert Leftovers(attached, dict).take(True, never) is None
    unfinished = Leftovers(PLAN, dict)
    unfinished.start()
    assert unfinished.take(False, never) is None
