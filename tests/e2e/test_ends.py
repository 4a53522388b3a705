"""How a run ends when something other than the plan happens: with a clear message, the right exit code, and nothing
left behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import RunScenario, kill_rank, left_over
from waiting import wait_until

pytestmark = pytest.mark.job
JOB_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SECRET = "q7-Zr4kTn2Lw9"


@pytest.fixture
def started(tmp_path: Path, cache: Path, reference: dict[str, Any]) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts a run of 5,000 steps, which nobody waits for, with a fault that never comes."""

    def start(twin: Any = "none", **env: str) -> subprocess.Popen[bytes]:
        job = {**reference, "command": reference["command"].replace("--steps 60", "--steps 5000")}
        path = tmp_path / "long.yaml"
        path.write_text(yaml.safe_dump(kill_rank({**job, "env": {**JOB_ENV, **env}}, when={"step": 4999}, twin=twin)))
        command = [sys.executable, "-m", "torchaos.harness", "run", str(path), "--out", str(tmp_path / "out")]
        reports = ["--junit", str(tmp_path / "junit.xml"), "--json", str(tmp_path / "all.json")]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        with open(tmp_path / "console.txt", "wb") as console:
            return subprocess.Popen([*command, *reports], env=environment, stdout=console, stderr=console)

    return start


def folder_of(tmp_path: Path) -> Path:
    """The run directory, once rank 1 is up."""
    found: Path = wait_until(lambda: next((tmp_path / "out").glob("*/events/rank1*"), None))
    return found.parents[1]


def test_an_interrupt_rolls_back_and_is_inconclusive(
    started: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """SIGINT ends the run in order: job gone, journal whole, verdict inconclusive, exit code 2."""
    harness = started()
    run = folder_of(tmp_path)
    harness.send_signal(signal.SIGINT)
    assert harness.wait(300) == 2, (tmp_path / "console.txt").read_text()
    result = json.loads((tmp_path / "all.json").read_text())["results"][0]
    assert result["verdict"] == "inconclusive"
    assert "SIGINT" in result["reason"]
    assert left_over(run) == []


def test_a_second_interrupt_hurries(started: Callable[[], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Two signals: everything is taken back all the same, without grace for the job and without the inventory."""
    harness = started()
    run = folder_of(tmp_path)
    harness.send_signal(signal.SIGINT)
    harness.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert harness.wait(300) == 2, (tmp_path / "console.txt").read_text()
    stages = (run / "events" / "harness.jsonl").read_text()
    assert '"stage":"stop job"' in stages
    assert '"stage":"inventory"' not in stages, f"ended after {time.monotonic() - begun:.1f} s"
    assert left_over(run) == []


def test_an_interrupt_during_the_twin(
    started: Callable[..., subprocess.Popen[bytes]], cache: Path, tmp_path: Path
) -> None:
    """The twin is ended in order too, what it was to show is not claimed, and no half of it stays in the cache."""
    harness = started(twin={"runs": 1}, TWIN_OF="the interrupt")
    found = wait_until(
        lambda: [p for p in cache.glob("torchaos/twins/*/run-0-*/events/rank1*") if f"-{harness.pid}" in str(p)]
    )
    harness.send_signal(signal.SIGTERM)
    assert harness.wait(300) == 2, (tmp_path / "console.txt").read_text()
    assert left_over_of(harness.pid) == []
    home = found[0].parents[2]
    assert not (home / "0").exists()
    result = json.loads((tmp_path / "all.json").read_text())["results"][0]
    assert "SIGTERM" in result["reason"]


def left_over_of(harness: int) -> list[int]:
    """Processes that carry the mark of any run of that harness: its run directories end with its pid."""
    marks = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if b"TORCHAOS_RUN_ID=" in environment and f"-{harness}-".encode() in environment:
            marks.append(int(process.name))
    return marks


def command(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", *words], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def listening(pid: int) -> list[str]:
    """The sockets of a process that wait for others to connect: TCP (state 0A) and Unix (flag 00010000)."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for table, column, inode, state in (("tcp", 3, 9, "0A"), ("tcp6", 3, 9, "0A"), ("unix", 3, 6, "00010000")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[column] == state and fields[inode] in own:
                found.append(f"{table}: {line.strip()}")
    return found


def test_seen_and_ended_from_elsewhere(started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """`status` tells what runs, nothing of ours listens on a socket, no secret is in the record, all of it is for its
    owner alone, and `halt` ends it in order."""
    harness = started(API_KEY=SECRET)
    run = folder_of(tmp_path)
    (view,) = (one for one in json.loads(command("status", "--json")[1])["runs"] if one["harness"] == harness.pid)
    assert (view["life"], view["scenario"], view["stage"], view["run_dir"]) == ("live", "kill-rank", "run", str(run))
    assert len(view["job"]) >= 3
    for pid in (view["harness"], view["reaper"]):
        assert listening(pid) == []
    code, said = command("halt", str(run))
    assert code == 0, said
    assert harness.wait(300) == 2, (tmp_path / "console.txt").read_text()
    assert left_over(run) == []
    for path in run.rglob("*"):
        if path.is_relative_to(run / "job"):
            continue
        assert path.lstat().st_mode & 0o077 == 0, f"{path} is open to others"
        if path.is_file() and path.name != "scenario.yaml":
            assert SECRET not in path.read_text(errors="replace"), path
    for path in (tmp_path / "console.txt", tmp_path / "all.json", tmp_path / "junit.xml"):
        assert SECRET not in path.read_text(), path
    assert command("judge", str(run))[0] == 2
    (run / "events" / "link.jsonl").symlink_to("/etc/passwd")
    code, said = command("judge", str(run))
    assert (code, "it is a link" in said) == (3, True), said


def test_a_run_directory_that_is_removed(started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Somebody removes it under a live run: a clear error and no verdict, and the job is ended all the same."""
    harness = started()
    run = folder_of(tmp_path)
    mark = json.loads((run / "agent" / "plan.json").read_text())["run_id"]
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)  # the job makes folders meanwhile
    code, text = harness.wait(300), (tmp_path / "console.txt").read_text()
    assert code in (4, 5), text
    assert "Traceback" not in text
    assert "was removed" in text or "can't be" in text, text
    assert not [pid for pid in left_over_of(harness.pid) if mark], text


def test_a_killed_harness_leaves_no_process_and_a_closed_gate(
    started: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """SIGKILL of the harness: the reaper ends the job, and the reports, written first, say error and not passed."""
    harness = started()
    run = folder_of(tmp_path)
    harness.kill()
    harness.wait(300)
    wait_until(lambda: not left_over(run))
    suite = ET.parse(tmp_path / "junit.xml").getroot()
    cases = list(suite.iter("testcase"))
    assert cases
    assert all(case.find("error") is not None for case in cases)
    assert json.loads((tmp_path / "all.json").read_text())["results"][0]["verdict"] == "error"


def test_a_job_that_dies_by_itself_is_inconclusive(torchaos: RunScenario, tmp_path: Path) -> None:
    """A job that crashes before its first step proves nothing about recovery: its own last words are the reason."""
    script = tmp_path / "crash.py"
    script.write_text("raise SystemExit('no such data set')\n")
    run = torchaos(kill_rank({"command": f"torchrun --nproc-per-node 2 {script}"}, when={"step": 5}))
    assert run.exit_code == 2, run
    assert "the job died before its first step was seen" in run.result["reason"], run
    assert "no such data set" in run.result["reason"], run


def test_a_command_that_does_not_exist_is_bad_usage(torchaos: RunScenario) -> None:
    """Exit code 3, one line, and no run directory."""
    run = torchaos(kill_rank({"command": "torchrunn --nproc-per-node 2 train.py"}, when={"step": 5}))
    assert run.exit_code == 3, run
    assert "torchrunn: no such program" in run.output
    assert "Traceback" not in run.output


def test_a_python_that_ignores_the_environment_is_inconclusive(torchaos: RunScenario, tmp_path: Path) -> None:
    """Where the agent can't get in (python -I), nothing lands and nothing is claimed."""
    script = tmp_path / "train.py"
    script.write_text("print('done')\n")
    command = f"torchrun --nproc-per-node 2 --no-python {{python}} -I {script}"
    run = torchaos(kill_rank({"command": command}, when={"step": 5}, twin="none"))
    assert run.exit_code == 2, run
    assert "never landed" in run.result["reason"], run


@pytest.mark.smoke
def test_a_job_that_never_recovers_is_failed(torchaos: RunScenario, reference: dict[str, Any]) -> None:
    """With no restart allowed, the job never gets past the step before the kill: failed, whatever else holds."""
    job = {**reference, "command": reference["command"].replace("--max-restarts 3", "--max-restarts 0")}
    run = torchaos(kill_rank(job, when={"step": 25, "phase": "backward"}, twin="none"))
    assert run.exit_code == 1, run
    assert "never got past step 24" in run.case("faults")["reason"], run


@pytest.mark.smoke
def test_attach_leaves_the_job_alive(torchaos: RunScenario, tmp_path: Path) -> None:
    """A torchrun that somebody else started: a rank is frozen for a second, and the job goes on after us. Nothing of
    ours is in its ranks to see what they do, so they only sleep."""
    script = tmp_path / "sleep.py"
    script.write_text("import os, pathlib, time\npathlib.Path('up' + os.environ['RANK']).touch()\ntime.sleep(3600)\n")
    command = f"torchrun --nproc-per-node 2 --max-restarts 3 {shlex.quote(str(script))}"
    job = subprocess.Popen(
        [str(Path(sys.executable).parent / "torchrun"), *shlex.split(command)[1:]],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: len(list(tmp_path.glob("up*"))) == 2, timeout_s=300.0)
        scenario = {
            "scenario": "freeze-attached",
            "job": {"command": command, "timeout": "8s"},
            "faults": [{"inject": "process.freeze", "target": {"rank": 1}, "when": {"time": "1s"}, "for": "1s"}],
            "assert": ["loss_continuity"],
        }
        run = torchaos(scenario, "--attach", str(job.pid))
        assert run.exit_code == 2, run
        assert "stopped" in str(run.result["faults"][0]["evidence"]), run
        assert run.result["faults"][0]["rollback"] == "verified", run
        assert run.case("loss_continuity")["verdict"] == "inconclusive", run
        assert job.poll() is None, "the attached job must go on"
    finally:
        job.terminate()
        job.wait(300)


def test_a_job_without_an_end_is_ended_once_enough_was_seen(torchaos: RunScenario, reference: dict[str, Any]) -> None:
    """The job would go on for hours: it is ended after the recovery from the second of two faults, and passes."""
    endless = {**reference, "command": reference["command"].replace("--steps 60", "--steps 1000000")}
    freeze = {"id": "freeze", "inject": "process.freeze", "target": {"rank": 0}, "for": "1s"}
    scenario = kill_rank(endless, when={"step": 12}, until=[{"recovered": {"rest": "1s"}}], twin="none")
    scenario["faults"][0]["id"] = "kill"
    scenario["faults"].append({**freeze, "when": {"after": "kill", "state": "recovered", "delay": "500ms"}})
    scenario["assert"] = ["recovery_time", "loss_continuity", "checkpoint_integrity"]
    run = torchaos(scenario)
    assert run.exit_code == 0, run
    events = (run.folder / "events" / "harness.jsonl").read_text()
    assert "enough was seen: recovered" in events
    assert len(run.result["recoveries"]) == 2, run
