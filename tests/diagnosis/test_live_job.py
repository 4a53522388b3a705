"""A real gloo job of three ranks, one of which blocks in its own code: its dumps, and the job itself while it hangs."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis import blame
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder
from torchaos.harness.monitoring.diagnosis.live_job import ranks_of

JOB = Path(__file__).with_name("jobs") / "recorded.py"
CULPRIT = 1
pytestmark = [pytest.mark.job, pytest.mark.smoke]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder of its dumps, and the pid of its torchrun; all its ranks have dumped in the stall."""
    out = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(JOB), str(out)]
    with open(out / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_pytest)
    try:
        end = time.monotonic() + 500
        while len(list(out.glob("done-*"))) < 3:
            assert process.poll() is None, (out / "log").read_text()
            assert time.monotonic() < end, f"only {sorted(path.name for path in out.iterdir())} by now"
            time.sleep(0.05)
        yield out, process.pid
    finally:
        ranks = ranks_of(process.pid).values()
        process.kill()
        process.wait()
        end = time.monotonic() + 60
        while left := [one.pid for one in ranks if _runs(one)]:
            assert time.monotonic() < end, f"pids {left} outlive their torchrun"
            time.sleep(0.02)


def _runs(rank: RankProcess) -> bool:
    now = processes.stat(rank.pid)
    return now is not None and now.ticks == rank.start_ticks and now.state != "Z"


def _end_with_pytest() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _diagnose(*arguments: object) -> tuple[int, str, str]:
    done = warm.torchaos("diagnose", *map(str, arguments))
    return done.returncode, done.stdout, done.stderr


def _json(*arguments: object) -> dict[str, Any]:
    code, out, errors = _diagnose(*arguments, "--json")
    assert code == 0, errors
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("folder", ["stalled", "stalled-json"])
def test_dumps_of_a_stall(job: tuple[Path, int], folder: str) -> None:
    """Both forms of gloo's record name the rank that never entered, and where its code was last."""
    found = _json(job[0] / folder)
    assert (found["culprits"], found["suspects"], found["confidence"]) == ([CULPRIT], [CULPRIT], "high")
    assert set(found) == {"culprits", "suspects", "confidence", "summary", "evidence", "problems"}
    assert any("never entered" in one for one in found["evidence"][str(CULPRIT)])


def test_dumps_of_a_healthy_moment(job: tuple[Path, int]) -> None:
    """The same job some seconds earlier: nobody is to blame."""
    found = _json(job[0] / "healthy")
    assert (found["culprits"], found["confidence"]) in (([], "none"), ([], "low"))


def test_copies_that_lost_their_time(job: tuple[Path, int], tmp_path: Path) -> None:
    """The times of the files say nothing: of the stall the same rank is named, and of the healthy moment nobody."""
    for name, culprits in (("stalled", {CULPRIT}), ("stalled-json", {CULPRIT}), ("healthy", set())):
        copied = shutil.copytree(job[0] / name, tmp_path / name)
        for path in copied.iterdir():
            os.utime(path, (2e9, 2e9))
        assert blame.diagnose(read_folder(copied)).culprits == culprits, name


def test_the_live_job(job: tuple[Path, int]) -> None:
    """By its pid alone, with nothing of ours in it: the stacks tell."""
    found = _json("--pid", job[1])
    assert found["culprits"] == [CULPRIT]
    assert "recorded.py" in found["evidence"][str(CULPRIT)][0]


def test_words(job: tuple[Path, int]) -> None:
    """Without --json it says the same in words."""
    code, out, _ = _diagnose(job[0] / "stalled")
    assert (code, out.splitlines()[0]) == (0, "rank 1 held up the other ranks (confidence: high)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to look at"),
        (("/no/such",), "not a directory"),
        (("--pid", 1), "pid 1"),
        (("EMPTY",), "no Flight Recorder dumps"),
    ],
)
def test_bad_usage(arguments: tuple[object, ...], words: str, tmp_path: Path) -> None:
    """One clear error and exit code 3."""
    code, _, errors = _diagnose(*(tmp_path if each == "EMPTY" else each for each in arguments))
    assert code == 3
    assert words in errors
    assert "Traceback" not in errors
