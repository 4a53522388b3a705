"""Old run directories are removed on request; a directory that may have changes to undo never is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.undo_log import OpenRun, UndoLog, UndoRecord
from torchaos.harness.running import twin
from torchaos.harness.running.housekeeping import at_work


def run_of(path: Path, days: float, size: int = 1 << 20) -> Path:
    folder = RunDir(path).create()
    folder.plan.write_text("{}")
    (folder.job / "data").write_bytes(bytes(size))
    for entry in (*folder.root.rglob("*"), folder.root):
        os.utime(entry, (time.time() - days * 86400,) * 2)
    return path


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs of 1 to 4 days ago, the oldest with something open and the next one still registered; and a folder
    that is none of ours."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "out"
    for days in range(1, 7):
        run_of(path / f"{days}-days", days)
    log = UndoLog(path / "6-days")
    log.append(UndoRecord("it", "it").to_line())
    log.close()
    os.utime(path / "6-days", (time.time() - 6 * 86400,) * 2)
    undo_log.add(OpenRun.of("five", path / "5-days", (1, 1)))
    (path / "notes").mkdir()
    (path / "link").symlink_to(path / "3-days")
    return path


def left(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()} - {"notes", "link", "5-days", "6-days"}


def prune(out: Path, *options: str) -> str:
    done = CliRunner().invoke(cli, ["prune", str(out), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert {"notes", "5-days", "6-days"} <= {path.name for path in out.iterdir()}, "what must never go is gone"
    return done.output


def test_spares_a_run_that_has_guarded_nothing_yet(out: Path) -> None:
    """In the middle of its twin it looks like one that was given up; what is judged goes, whoever is at work."""
    for path in (out / "4-days" / "result.json", out / "4-days"):
        path.is_dir() or path.write_text("{}")
        os.utime(path, (time.time() - 4 * 86400,) * 2)
    with at_work(["a scenario"]):
        prune(out, "--older-than", "12h")
        assert left(out) == {"1-days", "2-days", "3-days"}


def test_by_age(out: Path) -> None:
    """Those that ended longer ago than said; a dry run only names them."""
    assert "would remove" in prune(out, "--older-than", "60h", "--dry-run")
    assert left(out) == {"1-days", "2-days", "3-days", "4-days"}
    prune(out, "--older-than", "60h")
    assert left(out) == {"1-days", "2-days"}


def test_by_size(out: Path) -> None:
    """The oldest, until the rest fits."""
    prune(out, "--beyond", "2.5MiB")
    assert left(out) == {"1-days", "2-days"}


def test_only_when_told(out: Path) -> None:
    """Without a rule nothing is removed, and bad ones are refused."""
    for options in ([], ["--older-than", "7"], ["--beyond", "much"]):
        with pytest.raises(UsageError):
            CliRunner().invoke(cli, ["prune", str(out), *options], catch_exceptions=False)
    assert len(left(out)) == 4


def test_the_cache_of_twins_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones that were not used for the longest time go, but not the newest nor one that somebody works with."""
    monkeypatch.setattr(twin, "MOST_TWINS", 2)
    for age, name in enumerate(["newest", "used", "old", "busy"]):
        (tmp_path / name / "0").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - age * 100,) * 2)
    with open(tmp_path / "busy" / "lock", "w") as lock:
        os.utime(tmp_path / "busy", (time.time() - 1000,) * 2)
        assert twin._lock(lock.fileno())
        twin.forget_old(tmp_path / "newest")
    assert {path.name for path in tmp_path.iterdir()} == {"newest", "busy"}
