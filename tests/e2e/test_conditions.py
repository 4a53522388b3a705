"""Conditions before a fault, conditions that end a run early, and what is visible without an agent in the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos import RunScenario, kill_rank

pytestmark = pytest.mark.job

TRAINER = """\
import os, pathlib, time
done = pathlib.Path(os.environ["DONE"] + os.environ["RANK"])
start = int(done.read_text()) if done.exists() else 0
for step in range(start, 120):
    time.sleep(0.05)
    if step % 10 == 0:
        done.write_text(str(step))
    if os.environ["RANK"] == "0":
        print(f"iter {step}: loss {4 / (step + 1):.4f}, time 50.00ms, mfu 1.00%", flush=True)
"""


@pytest.mark.parametrize(
    ("step", "exit_code", "words"),
    [pytest.param(25, 0, "every fault", marks=pytest.mark.long), (3, 2, "not armed in time")],
)
def test_no_fault_before_the_steady_state(
    torchaos: RunScenario, reference: dict[str, Any], step: int, exit_code: int, words: str
) -> None:
    """A fault waits for its steady state; one whose Moment comes before that is missed, not late."""
    job = {**reference, "command": reference["command"].replace("--steps 60", "--steps 30")}
    settled = [{"steps": {"at_least": 10}}]
    run = torchaos(kill_rank(job, when={"step": step}, steady_state=settled, twin="none"))
    assert run.exit_code == exit_code, run
    assert words in run.result["reason"], run


def test_a_stop_condition_ends_the_run(torchaos: RunScenario, reference: dict[str, Any]) -> None:
    """A run that is ended by a condition says which, and is not passed."""
    run = torchaos(kill_rank(reference, when={"step": 5}, stop=[{"attempts": {"more_than": 1}}], twin="none"))
    assert run.exit_code in (1, 2), run
    events = (run.folder / "events" / "harness.jsonl").read_text()
    assert "the stop condition attempts holds" in events


def test_steps_are_read_from_the_log_where_no_agent_can_be(torchaos: RunScenario, tmp_path: Path) -> None:
    """A trainer whose Python ignores the environment: killed from outside, its steps and losses read from its lines,
    and what no line tells is inconclusive by name."""
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    job = {
        "command": f"torchrun --nproc-per-node 2 --max-restarts 2 --no-python {{python}} -I {script}",
        "env": {"DONE": "{run}/done-"},
        "log": {"format": "nanogpt"},
    }
    steps_are_seen = [{"steps": {"at_least": 10}}]
    scenario = kill_rank(job, when={"time": "1s"}, steady_state=steps_are_seen)
    scenario["assert"] = ["recovery_time", "loss_continuity", "sample_accounting", "restarts"]
    run = torchaos(scenario)
    assert run.exit_code == 2, run
    assert run.result["faults"][0]["evidence"], run
    verdicts = {case["name"]: case["verdict"] for case in run.result["cases"]}
    assert verdicts["recovery_time"] == "passed", run
    assert verdicts["loss_continuity"] == "passed", run
    assert "log" in run.case("loss_continuity")["reason"], run
    assert verdicts["sample_accounting"] == "inconclusive", run
