"""The kernel's OOM killer, with a real process: it dies from the limit of a cgroup of torchaos, and nothing is left
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.fault_drivers.site import OutsideSite, TargetGone, Victim
from torchaos.harness.protocol.wire import Event, Kind, start_ticks
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.rollback import cgroup_handles
from torchaos.harness.rollback.cgroup_handles import MemoryCgroup
from torchaos.injectors.process_hang import Uninterruptible
from torchaos.injectors.process_out_of_memory import OutOfMemory
from torchaos.injectors.straggle import StraggleQuota

PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0), (), ())
HUNGRY = """
import sys
print("ready", flush=True)
kept = [bytearray(1 << 20) for line in sys.stdin]
"""


@pytest.fixture
def hungry() -> Iterator[subprocess.Popen[str]]:
    try:
        home = MemoryCgroup.to_make(os.getpid(), "check").home
        if not os.access(home, os.W_OK):
            pytest.skip("needs a memory cgroup to write to")
    except (OSError, ValueError) as error:
        pytest.skip(f"needs a memory cgroup to write to: {error}")
    command = [sys.executable, "-c", HUNGRY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def _applied(pid: int, events: list[Event], **given: Any) -> tuple[OutOfMemory, Any, Any, Callable[..., Event]]:
    def told(kind: Kind, data: Any) -> Event:
        events.append(Event(kind, "harness", len(events), 0.0, time.monotonic(), data=data))
        return events[-1]

    injector, site = OutOfMemory(**given), OutsideSite("oom", [Victim(pid, start_ticks(pid) or 0, 1, 0)], told)
    (handle,) = injector.changes(site)
    site = replace(site, undo_on_disk=(handle,))
    told(Kind.APPLYING, {"fault": "oom", "phase": None, "global_step": 1, "pid": pid})
    injector.apply(site)
    (probe,) = injector.probes(site)
    return injector, handle, probe, told


@pytest.mark.needs("root")
def test_the_kernel_kills_it(hungry: subprocess.Popen[str]) -> None:
    """A process that takes more than is spared dies by SIGKILL; only with the cgroup's own count is that evidence."""
    events: list[Event] = []
    injector, handle, probe, told = _applied(hungry.pid, events)
    try:
        hungry.communicate("\n" * 64, timeout=300)
        assert hungry.returncode == -signal.SIGKILL
        told(Kind.RANK_EXITED, {"pid": hungry.pid, "exit_code": -signal.SIGKILL})
        assert injector.felt(Record(PLAN, tuple(events), {}), "oom") is None
        probe.sample(told)
    finally:
        handle.undo()
    found = injector.felt(Record(PLAN, tuple(events), {}), "oom")
    assert found is not None
    assert "OOM killer" in found.what
    assert handle.is_undone()


@pytest.mark.needs("root")
def test_the_limit_is_taken_back(hungry: subprocess.Popen[str]) -> None:
    """A process that took no more lives on in the cgroup that it came from, and may take what it likes."""
    place = Path(f"/proc/{hungry.pid}/cgroup")
    before = place.read_text()
    events: list[Any] = []
    _injector, handle, probe, told = _applied(hungry.pid, events, spare=64 << 20)
    assert place.read_text() != before
    handle.undo()
    assert place.read_text() == before
    hungry.communicate("\n" * 128, timeout=300)
    probe.sample(told)
    assert (hungry.returncode, [event.kind for event in events]) == (0, [Kind.APPLYING])


@pytest.fixture
def idle() -> Iterator[int]:
    """A process that may be frozen, should a fault really hit it: never the one of the tests."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("injector", [OutOfMemory(), StraggleQuota(), Uninterruptible()], ids=lambda one: one.name)
@pytest.mark.parametrize("since", ["nothing", "another process", "another cgroup"])
def test_only_what_was_guarded_is_hit(
    injector: Any, since: str, idle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that was replaced, or moved, since its way back was written down is left alone: nothing is made that no
    undo record names."""
    group = {"now": tmp_path / "a"}
    monkeypatch.setattr(cgroup_handles, "home_of", lambda pid, controller="cpu": (group["now"], 1))
    module = sys.modules[type(injector).__module__]
    if hasattr(module, "freezer_for"):
        monkeypatch.setattr(module, "freezer_for", lambda pid, name: cgroup_handles.FreezerCgroup(
            str(group["now"] / cgroup_handles._named(name, pid)), str(group["now"])
        ))  # fmt: skip
    for one in "ab":
        (tmp_path / one).mkdir()
    pid, ticks = idle, start_ticks(idle) or 0  # in folders that only look like cgroups
    site = OutsideSite("hit", [Victim(pid, ticks - (since == "another process"), 1, 0)], lambda *_: None)  # type: ignore[arg-type]
    (handle,) = injector.changes(site)
    site = replace(site, undo_on_disk=(handle,))
    if since == "nothing":
        injector.apply(site)
        assert Path(handle.path).is_dir()
        return
    if since == "another cgroup":
        group["now"] = tmp_path / "b"
    with pytest.raises(TargetGone):
        injector.apply(site)
    assert [*tmp_path.glob("?/*")] == []
