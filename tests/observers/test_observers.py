"""Each observer by itself, on real files and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.observers import end_of_job
from torchaos.harness.monitoring.observers.hang_detectors import LogSilence, Opinion, Overdue, Stagnation
from torchaos.harness.monitoring.observers.resource_use import Idle
from torchaos.harness.protocol.collective_stamps import Stamps
from torchaos.harness.protocol.wire import start_ticks
from torchaos.harness.record.plan import Named, Plan, PlannedJob
from torchaos.harness.record.rundir import RunDir

BUSY = "while True: pass"
LOOKS = "import time\nwhile True: time.sleep(0.0005)"  # at a page, for its word
REST = "import time; time.sleep(600)"
CROWDED = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\n"  # all on one processor
BELOW = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {BUSY!r}])"


@contextmanager
def _ranks(*codes: str) -> Iterator[list[RankProcess]]:
    """A process in place of each rank, in sessions of their own."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True) for code in codes]
    try:
        yield [
            RankProcess(rank, rank, 0, one.pid, start_ticks(one.pid) or 0, 0, len(codes))
            for rank, one in enumerate(running)
        ]
    finally:
        for one in running:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def _watch(idle: Idle, ranks: list[RankProcess], until_s: float, seconds: float = 20.0) -> Opinion:
    """Looks until it was quiet for that long, or for some seconds."""
    end = time.monotonic() + seconds
    while (one := idle.look(time.monotonic(), True, ranks)).quiet_s < until_s and time.monotonic() < end:
        time.sleep(0.1)
    return one


def _wait_until_busy(pid: int) -> None:
    """It, or its child, has begun to compute."""

    def used_s() -> float:
        all_of_it = [psutil.Process(pid), *psutil.Process(pid).children()]
        return max(sum(one.cpu_times()[:2]) for one in all_of_it)

    wait_until(used_s, lambda used: used >= 0.2)


def test_all_idle_is_quiet() -> None:
    """Ranks that use nothing are quiet, and named."""
    idle = Idle()
    with _ranks(REST, REST) as ranks:
        assert _watch(idle, ranks, 0.8).quiet_s >= 0.8
        assert idle.idle == [0, 1]


def test_one_that_works_is_not_quiet() -> None:
    """A rank that computes, or waits for a child that does (a compiler), keeps the job from being quiet."""
    for code in (BUSY, BELOW):
        with _ranks(REST, code) as ranks:
            _wait_until_busy(ranks[1].pid)
            idle = Idle()
            assert _watch(idle, ranks, 1.2, seconds=1.5).quiet_s < 1.2, code


def test_one_stopped_among_spinning_ones_is_quiet() -> None:
    """As on GPUs: the ones that wait spin, the one that is stopped does not."""
    with _ranks(BUSY, BUSY, BUSY) as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        idle = Idle()
        assert _watch(idle, ranks, 0.6).quiet_s >= 0.6 or os.cpu_count() == 1
        assert idle.stopped == [1]


@pytest.mark.slow
def test_ranks_that_only_look_at_a_page_are_quiet_on_a_busy_machine() -> None:
    """They use hardly any CPU, and wait for it at each look; a rank that is put off its work is not quiet."""
    crowd = [subprocess.Popen([sys.executable, "-S", "-c", CROWDED + BUSY]) for _ in range(4)]
    try:
        with _ranks(*[CROWDED + LOOKS] * 6) as ranks:
            idle, looks = Idle(), list[list[int]]()
            _watch(idle, ranks, 0.1)
            for _ in range(60):
                idle.look(time.monotonic(), True, ranks)
                looks.append(idle.idle)
                time.sleep(0.05)
            assert looks.count(list(range(6))) >= 54, looks
        with _ranks(CROWDED + LOOKS, CROWDED + BUSY) as ranks:
            _wait_until_busy(ranks[1].pid)
            assert _watch(Idle(), ranks, 2.0, seconds=3.0).quiet_s < 2.0
    finally:
        for one in crowd:
            one.kill()
            one.wait()


def test_metrics_are_blind_without_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ranks may wait for data that is on its way: without ss the observer can't tell, and says so."""
    (tmp_path / "ss").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ss").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with _ranks(REST) as ranks:
        one = _watch(Idle(), ranks, 1.0)
    assert (one.ready, "ss" in one.blind) == (False, True)


def test_stacks_are_blind_without_py_spy() -> None:
    """And say so, also while nobody asks them."""
    one = Stagnation(lambda: None).look(1.0, False, False, [])
    assert (one.ready, one.blind) == (False, "py-spy is not installed")


def test_a_log_that_stops_growing(tmp_path: Path) -> None:
    """Silence is measured from the last growth, and its longest pause is what is usual."""
    path = tmp_path / "job.log"
    silence = LogSilence(lambda: [path])
    for now in (0.0, 1.0, 2.0, 5.0, 6.0, 7.0):
        with path.open("a") as file:
            file.write(f"step {now}\n")
        one = silence.look(now, training=True)
    assert one.ready
    assert silence.look(9.0, training=True) == Opinion("log", 2.0, 3.0, True)


def test_a_collective_that_outlives_the_others(tmp_path: Path) -> None:
    """One that is open counts with its age; those that are over teach how long they take, once steps are over."""
    stamps = Stamps(tmp_path / "rank0-a0-p1.stamps", 0, 0, 1)
    overdue, group = Overdue(tmp_path), stamps.group("0", [0, 1])
    for step in range(12):
        stamps.ended(stamps.begin("all_reduce", group, 8, step))
        one = overdue.look(time.monotonic(), training=True)
    assert one.ready
    assert overdue.training
    stamps.begin("all_reduce", group, 8, 12)
    later = overdue.look(time.monotonic() + 7.0, training=True)
    assert later.quiet_s >= 7.0
    assert later.usual_s < 5.0
    stamps.close()


def test_only_the_latest_attempt_counts(tmp_path: Path) -> None:
    """What a rank that is gone never ended is no hang."""
    for attempt in (0, 1):
        stamps = Stamps(tmp_path / f"rank0-a{attempt}-p{attempt + 1}.stamps", 0, attempt, attempt + 1)
        number = stamps.begin("all_reduce", stamps.group("0", [0]), 8, 3)
        if attempt:
            stamps.ended(number)
        stamps.close()
    assert Overdue(tmp_path).look(time.monotonic() + 50.0, training=True).quiet_s < 1.0


def test_a_report_of_another_tool(tmp_path: Path) -> None:
    """It is read as data; what is wrong with it is said."""
    path = tmp_path / "said.json"
    assert "can't be read" in end_of_job.read(path)["error"]
    for text, expected in (
        ('{"culprits": [1, 3], "more": 1}', {"culprits": [1, 3]}), ('{"culprits": "1"}', None), ("[", None),
        ("[1]", None),
    ):  # fmt: skip
        path.write_text(text)
        found = end_of_job.read(path)
        assert found == expected if expected else "error" in found


def test_the_report_that_an_assertion_names_is_collected(tmp_path: Path) -> None:
    """`{run}` stands for the job's folder; where no assertion names a report, there is none."""
    folder = RunDir(tmp_path)
    folder.job.mkdir()
    (folder.job / "said.json").write_text('{"culprits": [2]}')
    job = PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0, None)
    plan = Plan("made-up", "", 7, job, (), (Named("culprit_identified", {"report": "{run}/said.json"}),))
    assert end_of_job.of_run(plan, folder) == {"culprits": [2]}
    assert end_of_job.of_run(replace(plan, asserts=(Named("hang_detected", {}),)), folder) is None
