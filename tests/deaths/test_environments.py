"""Difficult environments: each run ends with a clear error or with correct work, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from dying import clean
from dying.scene import HERE

from .conftest import Bench, Started

pytestmark = pytest.mark.slow

ENDS = {0, 1, 2, 4, 5}  # of a run that was under way: anything but bad usage and a signal's


def fill(disk: Path) -> None:
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(1 << 20)):
            pass
    with suppress(OSError), open(disk / "rest", "wb", buffering=0) as rest:
        while rest.write(b"x"):
            pass


@pytest.mark.needs("root")
def test_a_full_disk(bench: Bench, small_disk: Path) -> None:
    """Where no run directory can be made there is no run, and the one sentence says why."""
    fill(small_disk)
    code, output = bench.run("freeze-for", small_disk).end()
    assert code in (3, 5), output
    assert re.search("No space left|are free there", output), output
    bench.assert_clean()


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["job.started", "fault.armed", "fault.applied"])
def test_a_disk_that_fills_up(bench: Bench, small_disk: Path, kind: str) -> None:
    """The disk is full in mid-run: the run never passes, it ends, and what it had changed is taken back."""
    run = bench.run("damage", small_disk)
    bench.wait_for_event(run, kind, small_disk)
    fill(small_disk)
    code, output = run.end()
    assert code in ENDS - {0}, (code, output)
    bench.assert_clean()


def test_a_journal_that_cannot_be_written(bench: Bench) -> None:
    """The harness can write no file any more: the same."""
    run = bench.run("two-at-once")
    bench.wait_for_event(run, "fault.applied")
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    code, output = run.end()
    assert code in ENDS - {0}, (code, output)
    bench.assert_clean()


@pytest.mark.parametrize("kind", ["job.started", "fault.applied"])
def test_a_run_directory_that_is_deleted(bench: Bench, kind: str) -> None:
    """Somebody deletes the run directory in mid-run: an error, and what was changed is taken back all the same."""
    run = bench.run("freeze-on")
    shutil.rmtree(bench.wait_for_event(run, kind), ignore_errors=True)
    code, output = run.end()
    assert code in ENDS - {0}, (code, output)
    bench.assert_clean()


def test_a_clock_that_jumps(bench: Bench, tmp_path: Path) -> None:
    """The wall clock goes back or ahead by a day in mid-run: durations and the verdict are what they are without it."""
    plain, _ = bench.run("freeze-for").end()
    for jump_s, name in ((-86400, "back"), (86400, "ahead")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(
            "import itertools, time\nreal, calls = time.time, itertools.count()\n"
            f"time.time = lambda: real() + ({jump_s} if next(calls) > 20 else 0)\n"
        )
        path = f"{tmp_path / name}:{HERE / 'plugin'}:{os.environ.get('PYTHONPATH', '')}"
        code, output = bench.run("freeze-for", tmp_path / f"{name}-runs", PYTHONPATH=path).end()
        assert code == plain, output
        (result,) = (json.loads(path.read_text()) for path in tmp_path.glob(f"{name}-runs/*/result.json"))
        assert 0 < result["duration_s"] < 60
    bench.assert_clean()


def at_once(bench: Bench, count: int) -> list[Started]:
    return [bench.run("freeze-for") for _ in range(count)]


def test_two_at_once(bench: Bench) -> None:
    """The same scenario twice at the same time: each has a run directory of its own, and neither disturbs the other."""
    ends = [run.end() for run in at_once(bench, 2)]
    assert [code for code, _ in ends] == [2, 2], ends
    results = [json.loads(path.read_text()) for path in bench.stage.glob("out/*/result.json")]
    assert [one["faults"][0]["rollback"] for one in results] == ["verified", "verified"]
    bench.assert_clean()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_at_once(bench: Bench) -> None:
    """A hundred runs at the same time, on far fewer cores: all end by themselves, all is taken back."""
    ends = [run.end(wait_s=800) for run in at_once(bench, 100)]
    assert {code for code, _ in ends} <= {1, 2}, ends
    folders = list(bench.stage.glob("out/*"))
    assert len(folders) == 100
    assert [problem for folder in folders for problem in clean.undo_log(folder)] == []
    bench.assert_clean()


def test_a_reboot(bench: Bench) -> None:
    """Harness, reaper and job die with the machine. After it, `recover` puts the files back, and spares whoever has the
    pids now."""
    trace = bench.stage / "trace"
    at = [["harness after event fault.applied", 1, ["job", "reaper", "harness"]]]
    path = f"{HERE / 'mortal'}:{HERE / 'plugin'}:{os.environ.get('PYTHONPATH', '')}"
    run = bench.run("damage", PYTHONPATH=path, DYING_AT=json.dumps({"trace": str(trace), "at": at}))
    run.process.wait(300)
    for pid in clean.processes(bench.tag, {os.getpid()}):
        os.kill(pid, signal.SIGKILL)
    assert "died" in trace.read_text()
    bench.wait(lambda: not bench.processes(), "dead job")
    assert (bench.stage / "store" / "removed").exists() is False
    for file in [*bench.stage.glob("out/*/undo/undo.jsonl"), *bench.stage.glob("home/torchaos/runs/*/run.json")]:
        _of_another_boot(file)
    code, output = bench.torchaos("recover").end()
    assert code == 0, output
    bench.assert_clean()
    assert list(bench.stage.glob("home/torchaos/runs/*")) == []


def _of_another_boot(file: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot in file.read_text()
    with open(file, "r+") as both:  # in place: one may be a link to the other
        text = both.read().replace(boot, "0" * 8 + boot[8:])
        both.seek(0)
        both.write(text)
