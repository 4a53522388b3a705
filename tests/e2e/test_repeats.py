"""Repetitions of real runs, and an abort at interpreter exit that is a defect of torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import RunScenario, kill_rank, trainer

pytestmark = [pytest.mark.job, pytest.mark.long]


def scenario(script: str = "plain_ddp.py", **more: Any) -> dict[str, Any]:
    command = (
        f"torchrun --nproc-per-node 2 --max-restarts 3 {trainer(script)} --steps 12 --save-every 4 --dir {{run}}/out"
    )
    job = {"command": command, "checkpoints": {"path": "{run}/out"}, **more}
    return kill_rank(job, when={"step": 7, "phase": "backward"})


def test_a_rate_is_judged_over_real_runs(torchaos: RunScenario) -> None:
    """Two repetitions with seeds of their own, one twin, a verdict on their rate, and distributions in the report."""
    run = torchaos({**scenario(), "repeat": {"times": 2, "at_least": 2}})
    assert run.exit_code == 0, run
    found = json.loads((run.junit.parent / run.junit.name.replace("junit", "all")).with_suffix(".json").read_text())
    (together,) = found["repeats"]
    assert (together["verdict"], together["seeds"]) == ("passed", [0, 1])
    figures = {one["name"]: one for one in together["figures"]}
    assert figures["caught_up"]["count"] == 2
    assert figures["lost_steps"]["max"] == 2
    assert "--repeat 1" in found["results"][0]["reproduce"], "one repetition alone, and not all of them again"
    assert run.output.count("its fault-free twin") == 1


def test_a_series_that_is_halted_keeps_what_is_done(tmp_path: Path, cache: Path) -> None:
    """SIGTERM in the second of three repetitions: the first stands, the third never starts, and all is inconclusive."""
    path, out, report = tmp_path / "kill.yaml", tmp_path / "out", tmp_path / "all.json"
    path.write_text(yaml.safe_dump(scenario(), sort_keys=False))
    command = [sys.executable, "-m", "torchaos.harness", "run", str(path), "--out", str(out), "--json", str(report)]
    process = subprocess.Popen(
        [*command, "--repeat", "3", "--at-least", "1"], env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    end = time.monotonic() + 150
    while len(list(out.glob("*/events/harness.jsonl"))) < 2:
        assert time.monotonic() < end, f"the second repetition never began: {list(out.glob('*/*'))}"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    found = json.loads(report.read_text())
    assert [one["verdict"] for one in found["results"]] == ["passed", "inconclusive", "error"]
    assert found["repeats"][0]["reason"].startswith("halted after 2 of 3; 1 of 2 passed (1 inconclusive)")


def test_an_abort_on_the_way_out_is_set_aside_and_counted(torchaos: RunScenario) -> None:
    """After the recovery the job is done, aborts, and is started again by torchrun: passed, with a count and a note."""
    run = torchaos(scenario("aborts_at_exit.py"))
    assert run.exit_code == 0, run
    assert run.result["attempts"] == 3
    assert run.case("completed")["measured"]["teardown_aborts"] == 1
    assert any(
        "rank 0 aborted at interpreter exit in attempt 1, after step 12: set aside" in n for n in run.result["notes"]
    )


def test_without_a_checkpoint_to_verify_it_is_not_set_aside(torchaos: RunScenario) -> None:
    """The same where nobody says where the checkpoints are: one restart too many, and the note says why it counts."""
    told = scenario("aborts_at_exit.py")
    del told["job"]["checkpoints"]
    run = torchaos({**told, "assert": ["restarts", "loss_continuity", "completed"]})
    assert run.exit_code == 1, run
    assert run.case("restarts")["verdict"] == "failed"
    assert any("not set aside" in note for note in run.result["notes"])
