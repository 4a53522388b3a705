"""The main job: a rank of a live torchrun job is killed, and the recovery is judged. Then faults of other families, in
jobs that share its twin, and so the worker that runs these tests."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import REPOSITORY, RunScenario, cut_short, kill_rank, left_over, trainer
from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir

pytestmark = pytest.mark.job
MAIN = REPOSITORY / "scenarios" / "process" / "kill-rank.yaml"
STEPS = 40  # the last fault is in step 35
JOB = yaml.safe_load(MAIN.read_text())["job"] | {"command": cut_short(MAIN, STEPS)[1].partition("=")[2]}


@pytest.mark.smoke
def test_kill_rank_is_judged_and_passes(torchaos: RunScenario, tmp_path: Path) -> None:
    """The scenario of `make demo` passes: the kill landed on its rank, step and phase, and nothing was lost or left.
    Its folder is judged again, moved and read-only: the verdict is the same, and no socket, process or outside path is
    touched."""
    slow = "assert.0.recovery_time.catch_up=5m"  # a busy machine takes more than the minute
    run = torchaos(MAIN, "--set", slow, *cut_short(MAIN, STEPS))
    assert run.exit_code == 0, run
    fault = run.result["faults"][0]
    assert fault["applied"].startswith("step 25, backward"), fault
    pid = re.search(r"pid (\d+)", fault["applied"])
    assert pid, fault
    log = (run.folder / "logs" / "job-0.log").read_text()
    assert re.search(rf"exitcode: -9\).*local_rank: 1 \(pid: {pid[1]}\)", log), "torchelastic is the witness"
    assert {case["verdict"] for case in run.result["cases"]} == {"passed"}
    assert run.result["steps"] == STEPS
    assert left_over(run.folder) == []
    assert "<title>passed: kill-rank</title>" in (run.folder / "report.html").read_text()
    suite = ET.parse(run.junit).getroot()
    assert not suite.findall(".//failure")
    assert not suite.findall(".//error")
    assert {case.get("name") for case in suite.iter("testcase")} >= {"recovery_time", "loss_continuity", "rollback"}
    _judged_offline(run.folder, tmp_path)


def _judged_offline(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "moved")
    for path in [*moved.rglob("*"), moved]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    watched = REPOSITORY / "tests" / "e2e" / "judge_under_audit.py"
    done = subprocess.run([sys.executable, watched, moved], capture_output=True, text=True, timeout=300, check=False)
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o700)
    moved.rename(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outside: none" in done.stdout, done.stdout


@pytest.mark.smoke
def test_several_faults_in_one_run(torchaos: RunScenario) -> None:
    """A rank does not enter an all-reduce; later its gradient is NaN, which the job notices, and a bit of its newest
    checkpoint flips before the restart. The job goes back to the one before, and ends as its twin."""
    flip = {"inject": "checkpoint.flip_bits", "when": {"attempt": 1, "phase": "start"}, "with": {"bits": 1}}
    nan = {"inject": "numeric.gradient", "target": {"rank": 1}, "when": {"step": 35}, "with": {"change": "nan"}}
    when = {"step": 5, "operation": "all_reduce"}
    stall = {"inject": "collective.stall", "target": {"rank": 1}, "when": when, "for": "2s"}
    scenario = kill_rank(JOB, when=when, faults=[stall, nan, flip])
    scenario["assert"] += [{"sdc_detected": {"within": 3, "by": "job"}}, "lr_continuity", "state_restored"]
    run = torchaos(scenario)
    assert run.exit_code == 0, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert [attempt.base for attempt in Record.load(RunDir(run.folder)).history.attempts] == [0, 20], run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []


@pytest.mark.smoke
def test_other_families(torchaos: RunScenario) -> None:
    """The faults of data loading, stragglers and CUDA, each from its ready scenario, in one run: each is felt, only the
    last one restarts the job, and it ends as its twin. The assertions need the same records as those of the main
    scenario, so that its twin will do."""
    names = ("collective/straggler-sleep", "collective/data-loader-stalls", "gpu/out-of-memory")
    ready = [yaml.safe_load((REPOSITORY / "scenarios" / f"{name}.yaml").read_text()) for name in names]
    faults = [fault for one in ready for fault in one["faults"]]
    faults[-1]["when"]["step"] = 35  # after the others, in the same attempt
    asserts = ["checkpoint_integrity", "loss_continuity", "parameter_digest", "sample_accounting", "completed"]
    run = torchaos(kill_rank(JOB, when={"step": 35}, faults=faults) | {"assert": asserts})
    assert run.exit_code == 0, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert run.result["attempts"] == 2, run
    assert left_over(run.folder) == []


@pytest.mark.long
def test_kill_after_the_last_step(torchaos: RunScenario, reference: dict[str, Any]) -> None:
    """The last checkpoint is written beside training. A kill that breaks it is judged by what comes of it; when it was
    whole already, nothing was left to do, and the kill proves nothing."""
    run = torchaos(kill_rank(reference, when={"step": 61}))
    done_again = run.result["recoveries"][0]["lost_steps"]
    assert run.exit_code == (0 if done_again else 2), run
    assert done_again or "after the last step" in run.result["reason"], run


@pytest.mark.long
def test_kill_long_after_the_end_is_inconclusive(torchaos: RunScenario, reference: dict[str, Any]) -> None:
    """A fault that never comes proves nothing, however well the job went."""
    run = torchaos(kill_rank(reference, when={"step": 90}))
    assert run.exit_code == 2, run
    assert run.result["verdict"] == "inconclusive"
    assert "never landed" in run.result["reason"]


@pytest.mark.parametrize(
    ("part", "assertion", "words"),
    [
        ("rng", "loss_continuity", "RNG"),
        ("optimizer", "loss_continuity", "optimizer"),
        ("schedule", "loss_continuity", "schedule"),
        ("sampler", "sample_accounting", "sampler"),
    ],
)
@pytest.mark.long  # the sample of the bench shows such a one, too
def test_a_restore_that_forgets_is_failed(
    torchaos: RunScenario, reference: dict[str, Any], part: str, assertion: str, words: str
) -> None:
    """The reference job with one part of its restore taken out is failed by the right assertion, in words."""
    script = trainer(f"broken/no_{part}.py")
    job = {**reference, "command": reference["command"].replace("{jobs}/gpt_ddp.py", script)}
    run = torchaos(kill_rank(job, when={"step": 25, "phase": "backward"}))
    assert run.exit_code == 1, run
    assert run.case("faults")["verdict"] == "passed", run
    assert run.case(assertion)["verdict"] == "failed", run
    assert words in run.case(assertion)["reason"], run.case(assertion)["reason"]


def test_two_plans_of_one_seed_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed decides everything that is drawn, in every process; another seed draws something else."""
    scenario = REPOSITORY / "scenarios" / "process" / "segfault-rank.yaml"

    def plan(seed: int) -> str:
        return CliRunner().invoke(cli, ["plan", "--json", "--seed", str(seed), str(scenario)]).stdout

    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "torchaos.harness", "plan", "--json", "--seed", "3", str(scenario)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == plan(3)
    drawn = {plan(seed).replace(f'"seed": {seed}', "") for seed in range(8)}
    assert len(drawn) == 2, "rank 0 or rank 1"
