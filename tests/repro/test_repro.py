"""The script that shows a finding without torchaos: its contents, and that it shows only what the run showed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.repro import case_of, script_of
from torchaos.harness.reporting.repro.summary import summary

RUNS = Path(__file__).parents[1] / "data" / "runs"
STAND_IN = Path(__file__).parent / "stand_in.py"
PLAIN = r"\bstep (?P<step>\d+) loss (?P<loss>\S+)"


def recorded(name: str) -> tuple[Record, list[Record], Result]:
    folder = RunDir(RUNS / name)
    run = Record.load(folder)
    twins = [Record.load(RunDir(path)) for path in sorted(folder.twins.iterdir())] if folder.twins.is_dir() else []
    return run, twins, verdict_of(run, twins, "/run")


def test_what_goes_into_the_script() -> None:
    """Of a trainer that forgot its optimizer: SIGKILL to rank 1 after step 15, and what will differ."""
    case = case_of(*recorded("forgets-optimizer"), promise="docs: it resumes exactly")
    assert case["kills"] == [{"ranks": [1], "signals": [[0.0, 9]], "step": 15, "path": None}]
    assert case["signs"] == ["losses", "checkpoint"]
    assert case["finding"].startswith("loss_continuity: the learning rate differs first in step 13 on rank 0")
    assert (case["promise"], case["controls"], case["checkpoints"]) == (
        "docs: it resumes exactly",
        1,
        "{run}/checkpoints",
    )
    assert case["env"] == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert "torch 2.13.0" in case["versions"]


def test_where_the_log_tells_nothing_the_checkpoint_does() -> None:
    """Without lines of steps, the kill waits for the checkpoint that the job then resumed from."""
    run, twins, result = recorded("forgets-optimizer")
    blind = replace(run, events=tuple(event for event in run.events if event.kind.value != "log.step"))
    case = case_of(blind, twins, result)
    assert case["kills"][0]["path"] == "checkpoints/step-12"
    assert (case["kills"][0]["step"], case["log"], case["signs"]) == (None, [], ["checkpoint"])
    assert case["controls"] == 2, "what differs between two controls is no sign"


def test_without_steps_in_the_log_a_passed_run_has_no_sign_of_time() -> None:
    """Nobody can see in such a log when the job went on, so a healthy job would look as if it never had."""
    run, twins, result = recorded("kill")
    blind = replace(run, events=tuple(event for event in run.events if event.kind.value != "log.step"))
    assert case_of(blind, twins, result)["signs"] == ["end", "checkpoint"]


def test_other_findings_have_other_signs() -> None:
    """A job that never came back shows in its end; a run that passed has no finding, and all signs are looked for."""
    assert case_of(*recorded("stale-store"))["signs"] == ["end"]
    passed = case_of(*recorded("kill"))
    assert (passed["finding"], passed["signs"]) == ("", ["end", "losses", "checkpoint", "time"])
    resubmitted = case_of(*recorded("resubmitted"))
    assert resubmitted["resubmit"] == [1, 1.0]
    assert case_of(*recorded("freeze"))["kills"][0]["signals"] == [[0.0, 19]], "SIGSTOP, and nobody takes it back"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda run: replace(run, faults=(replace(run.faults[0], inject="numeric.gradient"),)),
            "`kill` can't cause",
        ),
        (lambda run: replace(run, job=replace(run.job, nodes=2)), "2 nodes"),
        (lambda run: replace(run, job=replace(run.job, attach_pid=7)), "attached to pid 7"),
        (lambda run: replace(run, job=replace(run.job, command=("torchrun", "--api-key", "***"))), "a secret"),
        (lambda run: replace(run, faults=()), "no fault was planned"),
        (lambda run: replace(run, faults=(replace(run.faults[0], times=2),)), "can't be seen from outside"),
    ],
)
def test_what_can_t_be_shown_by_hand_is_refused(change: Callable[[Any], Any], words: str) -> None:
    """Faults inside a rank, several nodes, a job of somebody else's, secrets in the command: each is named."""
    run, twins, result = recorded("forgets-optimizer")
    with pytest.raises(UsageError, match=words):
        case_of(replace(run, plan=change(run.plan)), twins, result)


@pytest.mark.parametrize(("name", "words"), [("kill-twice", "within the recovery"), ("missed", "never landed")])
def test_the_command_refuses_with_a_reason(tmp_path: Path, name: str, words: str) -> None:
    """A moment that only the agent sees, or a fault that never came: bad usage (exit code 3), and no script."""
    done = CliRunner().invoke(cli, ["repro", str(RUNS / name), "--out", str(tmp_path / "script.py")])
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)
    assert not (tmp_path / "script.py").exists()


def test_the_command_writes_a_script_that_stands_alone(tmp_path: Path) -> None:
    """It can be executed, imports nothing of torchaos, knows its options, and is not written over another file."""
    path = tmp_path / "script.py"
    arguments = ["repro", str(RUNS / "forgets-optimizer"), "--out", str(path), "--promise", 'it says "exactly" \\ here']
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{path}: written; run it with python, without torchaos\n  shows     ")
    assert max(map(len, done.output.splitlines()[1:])) <= 100
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert "import torchaos" not in text
    assert "from torchaos" not in text
    ast.parse(text, feature_version=(3, 9))  # the oldest Python that it promises
    shown = subprocess.run([sys.executable, "-I", path, "--help"], capture_output=True, text=True, check=False)
    assert (shown.returncode, "--runs" in shown.stdout) == (0, True), shown.stderr
    assert isinstance(CliRunner().invoke(cli, arguments).exception, UsageError)


def case(**more: Any) -> dict[str, Any]:
    return {
        "scenario": "s", "finding": "loss_continuity: the loss differs", "promise": "", "versions": "torch 2.13.0",
        "command": [sys.executable, "-S", str(STAND_IN), "{run}/job"], "cwd": "/", "env": {}, "secrets": [],
        "python": "/bin/true", "log": [PLAIN], "lead": 0, "checkpoints": None, "controls": 1,
        "signs": ["losses", "end"],
        "kills": [{"ranks": [1], "signals": [[0.0, 9]], "step": 6, "path": None}],
        "bound_s": None, "timeout_s": 60.0, "resubmit": [0, 0.0], **more,
    }  # fmt: skip


Shown = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    def run(*options: str, runs: int = 2, **more: Any) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(script_of(case(**more)))
        command = [sys.executable, "-I", str(path), "--runs", str(runs), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)

    return run


def words(*flags: str) -> list[str]:
    return [sys.executable, "-S", str(STAND_IN), "{run}/job", *flags]


def test_a_broken_trainer_is_shown_three_times(shown: Shown, tmp_path: Path) -> None:
    """It resumes and forgets its momentum: 3 of 3 and a control, with versions, pids and the step that differs."""
    done = shown("--keep", str(tmp_path / "kept"), runs=3, command=words("--forget"), python=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REPRODUCED in 3 of 3 runs: losses" in done.stdout
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["finding", "job", "versions", "control"]
    assert "torch" in lines[2]
    assert "SIGKILL to rank 1 (pid " in lines[4]
    assert "it went on after step 4" in lines[4]
    assert "losses differ from step 5 on: 5 instead of 13.1441" in lines[4]
    assert (tmp_path / "kept" / "run-3.log").read_text().count("step 5 loss") == 2


def test_steps_are_counted_as_in_the_verdict(shown: Shown) -> None:
    """A log that counts one step more than the verdict: step 6 of the log is step 5, everywhere in the output."""
    ahead = {"lead": 1, "kills": [{"ranks": [1], "signals": [[0.0, 9]], "step": 5, "path": None}]}
    done = shown(command=words("--forget"), **ahead)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it went on after step 3" in done.stdout
    assert "losses differ from step 4 on: 5 instead of 13.1441" in done.stdout


def test_the_script_knows_by_how_much_the_log_is_ahead() -> None:
    """A job that prints each step one too high: the kill and the signs are told by the steps of the verdict."""
    run, twins, result = recorded("forgets-optimizer")
    events = [
        replace(e, data={**e.data, "step": e.data["step"] + 1}) if e.kind is Kind.LOG_STEP else e for e in run.events
    ]
    case = case_of(replace(run, events=tuple(events)), twins, result)
    assert (case["lead"], case["kills"][0]["step"]) == (1, 15)


def test_a_healthy_trainer_is_not(shown: Shown) -> None:
    """The same kill, and all losses are those of the control: not reproduced, exit code 1."""
    done = shown()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing differs from the control" in done.stdout
    assert "NOT REPRODUCED, 2 tried" in done.stdout


def test_a_repair_can_be_tried(shown: Shown) -> None:
    """With another command after --, the broken one's script runs the mended job."""
    done = shown("--", *words(), command=words("--forget"))
    assert done.returncode == 1, done.stdout + done.stderr


def test_a_noisy_job_is_no_evidence(shown: Shown) -> None:
    """Losses that differ before the kill already say nothing about the recovery: exit code 2."""
    done = shown(command=words("--noisy"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "already before the kill" in done.stdout


def test_a_job_that_does_not_come_back(shown: Shown) -> None:
    """Every restart dies: it shows in the exit code, and none of its processes is left."""
    done = shown(runs=1, command=words("--dies-after-restart"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it ended with exit code 1" in done.stdout


def test_a_job_that_hangs_is_ended(shown: Shown, tmp_path: Path) -> None:
    """A frozen rank holds the job up until its time is over: ended, and no process of it outlives the script."""
    kills = [{"ranks": [0], "signals": [[0.0, 19]], "step": 6, "path": None}]
    done = shown("--keep", str(tmp_path / "kept"), runs=1, kills=kills, timeout_s=10.0, signs=["end"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it did not end in time" in done.stdout
    workers = [path.name.split("-")[2] for path in (tmp_path / "kept").rglob("worker-*")]
    assert workers
    assert not [pid for pid in workers if is_sleeper(pid)]


def is_sleeper(pid: str) -> bool:
    return b"time.sleep(600)" in cmdline(pid)


def cmdline(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_job_too(tmp_path: Path, number: signal.Signals) -> None:
    """Who ends the script, or closes its terminal, leaves no process of the job behind, nor its folder."""
    kept, path = tmp_path / "kept", tmp_path / "script.py"
    path.write_text(script_of(case(command=words("--steps", "600"), timeout_s=60.0)))
    command = [sys.executable, "-I", str(path), "--keep", str(kept)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        end = time.monotonic() + 300
        while len(workers := sorted(kept.rglob("worker-*"))) < 2:
            assert time.monotonic() < end, workers
            time.sleep(0.02)
        pids = [one.name.rpartition("-")[2] for one in workers]
        script.send_signal(number)
        said = script.communicate(timeout=300)[0]
    left = [pid for pid in pids if is_sleeper(pid)]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert left == [], said
    assert script.returncode == 128 + number, said


AT_THE_START = """
import os, runpy, signal, subprocess, sys

class Popen(subprocess.Popen):
    def _execute_child(self, *args, **more):
        super()._execute_child(*args, **more)
        if any(isinstance(one, dict) and "REPRO_MARK" in one for one in args):
            os.kill(os.getpid(), signal.SIGHUP)

subprocess.Popen = Popen
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_signal_while_the_job_is_being_started(tmp_path: Path) -> None:
    """The process is there, and the script has not yet got hold of it: it is ended all the same, and the exit code says
    which signal it was."""
    kept, path = tmp_path / "kept", tmp_path / "script.py"
    path.write_text(script_of(case(command=words("--steps", "600"), timeout_s=60.0)))
    command = [sys.executable, "-I", "-c", AT_THE_START, str(path), "--keep", str(kept)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and os.fsencode(kept) in cmdline(pid)]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert left == [], done.stdout
    assert done.returncode == 128 + signal.SIGHUP, done.stdout


def test_strangers_are_spared(shown: Shown) -> None:
    """A process that bears the same RANK and is no descendant of our torchrun lives on."""
    stranger = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "RANK": "1"}
    )
    try:
        assert shown(runs=1).returncode == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"kills": [{"ranks": [1], "signals": [[0.0, 9]], "step": 99, "path": None}]}, "no line|give it more steps"),
        ({"command": words("--steps", "0", "--nonsense")}, "did not end well"),
        ({"secrets": ["REPRO_TEST_TOKEN"]}, "set REPRO_TEST_TOKEN"),
        ({"log": [r"iteration (?P<step>\d+)"]}, "no line with a step"),
    ],
)
def test_what_is_no_evidence_is_said(shown: Shown, more: dict[str, Any], why: str) -> None:
    """A kill that comes too late, a control that fails, secrets that are missing, a log without steps: exit code 2."""
    done = shown(runs=1, **more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert any(one in done.stdout for one in why.split("|")), done.stdout


def test_a_log_without_steps_is_no_sign_of_a_late_recovery(shown: Shown) -> None:
    """A healthy job whose log has no step is not reproduced by `time`."""
    kills = [{"ranks": [1], "signals": [[0.0, 9]], "step": None, "path": "job/state.json"}]
    done = shown(kills=kills, log=[], bound_s=60.0, signs=["end", "losses", "checkpoint", "time"])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "it never got further" not in done.stdout
    assert "NOT REPRODUCED" in done.stdout


def test_a_checkpoint_is_waited_for(shown: Shown) -> None:
    """Where the kill waits for a file, it comes once that is there, and the job goes on from it."""
    kills = [{"ranks": [0, 1], "signals": [[0.0, 15], [0.2, 9]], "step": None, "path": "job/state.json"}]
    done = shown(runs=1, kills=kills, command=words("--forget"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGTERM and SIGKILL to rank 0, 1" in done.stdout
    assert "losses differ from step 5 on" in done.stdout


def test_the_summary_of_a_checkpoint(tmp_path: Path) -> None:
    """The newest of torch.save files and sharded folders, tensor by tensor; one number that differs shows."""
    weights = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 3, "lr": [0.1]}
    torch.save({"old": torch.zeros(1)}, tmp_path / "old.pt")
    os.utime(tmp_path / "old.pt", (1, 1))
    (tmp_path / "note.txt").write_text("no checkpoint")
    os.utime(tmp_path / "note.txt", (2, 2))
    torch.save(weights, tmp_path / "new.pt")
    first = summary(str(tmp_path))
    assert {name.removeprefix("new.pt.") for name in first} == {"model.w", "step", "lr.0"}
    weights["model"]["w"][1, 2] += 1e-3  # type: ignore[index]
    torch.save(weights, tmp_path / "new.pt")
    again = summary(str(tmp_path))
    assert [name for name in first if first[name] != again[name]] == ["new.pt.model.w"]
    save_sharded({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-9", no_dist=True)
    assert list(summary(str(tmp_path))) == ["step-9.w"]
    assert summary(str(tmp_path / "nowhere")) == {}


@pytest.mark.job
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "code"), [("tests/trainers/broken/no_optimizer.py", 0), ("scenarios/jobs/gpt_ddp.py", 1)]
)
def test_real_jobs(tmp_path: Path, script: str, code: int) -> None:
    """The reference job without its optimizer's state shows it in 3 of 3 runs; the whole one in none."""
    repository = Path(__file__).parents[2]
    told = case_of(*recorded("forgets-optimizer"))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    options = [word for word in told["command"][1:] if not word.endswith(".py")]
    at = options.index("--max-restarts") + 2
    command = [torchrun, *options[:at], str(repository / script), *options[at:]]
    path = tmp_path / "script.py"
    path.write_text(script_of({**told, "command": command, "cwd": str(repository), "python": sys.executable}))
    done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        assert "REPRODUCED in 3 of 3 runs: checkpoint, losses" in done.stdout
        assert str(told["finding"])[:40] in done.stdout
