"""Conditions about the disk or the result of a command; and what the harness watches about itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, UsageError, Watched
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Named, Plan, PlannedJob
from torchaos.harness.running.conditions.outside import CommandFails, CommandSucceeds, DiskFree
from torchaos.harness.running.engine import supervision
from torchaos.harness.running.engine.supervision import ConditionWatches, SelfCheck, check_disk
from torchaos.harness.scenario.field_types import parse_size

PLAN = Plan("watch", "", 0, PlannedJob(("torchrun",), "/", {}, 1, 1, 60.0), (), ())


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    found = Journal(tmp_path)
    yield found
    found.close()


@pytest.fixture
def at(tmp_path: Path) -> Watched:
    return Watched(tmp_path, tmp_path / "not" / "yet", f"mark-{os.getpid()}-{tmp_path.name}")


@pytest.mark.parametrize(
    ("condition", "holds", "says"),
    [
        (DiskFree(below=1), False, "are free at"),
        (DiskFree(below=1 << 60, of="checkpoints"), True, "are free at"),
        (CommandFails(["true"]), False, "ended with 0"),
        (CommandFails(["sh", "-c", "exit 3"]), True, "ended with 3"),
        (CommandFails(["/no/such/program"]), True, "can't be run"),
        (CommandFails(["sleep", "60"], timeout=0.2), True, "took longer than 0.2 s"),
        (CommandSucceeds(["true"]), True, "ended with 0"),
        (CommandSucceeds(["false"]), False, "ended with 1"),
        (CommandSucceeds(["/no/such/program"]), False, "can't be run"),
    ],
)
def test_what_a_look_says(journal: Journal, at: Watched, condition: Any, holds: bool, says: str) -> None:
    """Unknown before the first look; then yes or no, with a sentence; an answer is recorded only when it changes."""
    assert condition.holds((), 0.0) is None
    (probe,) = condition.probes(at)
    for _again in range(2):
        probe.sample(journal.emit)
    (event,) = (event for event in journal.snapshot() if event.kind is Kind.PROBED)
    assert says in event.data["reason"]
    assert condition.holds(journal.snapshot(), 0.0) is holds


def test_a_command_leaves_nothing(journal: Journal, at: Watched) -> None:
    """What a command started in the background ends with it, and its arguments are not recorded."""
    (probe,) = CommandFails(["sh", "-c", "setsid sleep 600 & true s3cr3t"]).probes(at)
    probe.sample(journal.emit)
    assert processes.family(at.mark) == {}
    assert "s3cr3t" not in repr(journal.snapshot())


def test_a_stop_condition_ends_it_with_its_reason(journal: Journal, at: Watched) -> None:
    """The run is told which condition holds, why, and that it says nothing about the job; a command under way when the
    run ends is ended."""
    fails = Named("command_fails", {"run": ["false"], "every": 0.05})
    hangs = Named("command_succeeds", {"run": ["sleep", "600"], "timeout": 600.0})
    conditions = ConditionWatches(replace(PLAN, stop=(fails,), steady_state=(hangs,)), at, journal.emit)
    conditions.start()
    reason, about_job = wait_until(lambda: conditions.broken(journal.snapshot(), 0.0))
    assert (reason, about_job) == ("the stop condition command_fails holds: false ended with 1", False)
    assert not conditions.steady(journal.snapshot(), 0.0)
    wait_until(lambda: processes.family(at.mark))
    conditions.stop()
    assert processes.family(at.mark) == {}


@pytest.mark.parametrize(("text", "size"), [("1GB", 10**9), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("7B", 7)])
def test_sizes(text: str, size: int) -> None:
    """A number with a unit, decimal or binary."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", 5, "5 apples", "-1GB", "", None, "1gb"])
def test_sizes_need_a_unit(text: object) -> None:
    """Everything else is refused, with an example."""
    with pytest.raises(ValueError, match="such as 500MB"):
        parse_size(text)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room: no run starts, and the text says how much there is; one under way is ended."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=63 << 20))
    with pytest.raises(UsageError, match=r"66\.1 MB are free there, and a run needs 268\.4 MB"):
        check_disk(tmp_path)
    assert "only 66.1 MB are free" in str(SelfCheck(tmp_path).trouble())


def test_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that has grown beyond its limit ends the run rather than the machine's memory."""
    assert SelfCheck(tmp_path).trouble() is None
    monkeypatch.setattr(supervision, "MEMORY_MOST", 1 << 20)
    assert "of memory" in str(SelfCheck(tmp_path).trouble())


def test_a_run_directory_that_is_gone(tmp_path: Path) -> None:
    """Somebody removed it: the run can't be recorded any more."""
    assert "was removed" in str(SelfCheck(tmp_path / "gone").trouble())


def test_a_journal_that_cannot_be_written(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: nothing raises where it would keep faults from being taken back, but it is known."""

    def full(*_: Any, **__: Any) -> Event:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal._own, "emit", full)
    event = journal.emit(Kind.NOTE, {"text": "lost"})
    assert event in journal.snapshot()
    assert journal.failed == "the journal can't be written: No space left on device"
    monkeypatch.undo()
    journal.close()
    with pytest.raises(ChaosError, match="the run is over"):
        journal.emit(Kind.NOTE, {"text": "too late"})
