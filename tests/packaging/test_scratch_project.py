"""A project outside the repository, with the wheel alone: three scenarios under pytest, a real job each."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.job, pytest.mark.timeout(900)]

SCENARIO = """
scenario: {name}
job:
  command: torchrun --nproc-per-node 2 --max-restarts 3 {{jobs}}/gpt_ddp.py --steps 30 --checkpoint-dir {{run}}/c
  env: {{TORCH_DISABLE_SHARE_RDZV_TCP_STORE: "1"}}
  checkpoints: {{path: "{{run}}/c"}}
  timeout: 5m
faults:
  - inject: process.kill
    target: {{rank: 1}}
    when: {{step: {step}, phase: backward}}
assert:
  - recovery_time: {{catch_up: {bound}}}
  - loss_continuity
  - completed
"""
VERDICTS = {"kill-rank": "passed", "too-slow": "failed", "too-late": "inconclusive"}
TEST = """
import pytest

@pytest.mark.torchaos("kill-rank.yaml")
def test_recovers(run):
    assert run.recovery.caught_up_s < 60
    assert run.record.history.last_step == run.twin.history.last_step == 30
"""


def test_three_scenarios(from_wheel: Path, tmp_path: Path) -> None:
    """One passes, one fails for a bound that nobody can keep, one is inconclusive since its fault comes too late:
    pytest, its JUnit file and the pages say so; the three share one twin, and a test in Python the first one's run."""
    for name, step, bound in (("kill-rank", 12, "60s"), ("too-slow", 12, "1ms"), ("too-late", 90, "60s")):
        (tmp_path / f"{name}.yaml").write_text(SCENARIO.format(name=name, step=step, bound=bound))
    (tmp_path / "pytest.ini").write_text("[pytest]\ntorchaos_scenarios = *.yaml\n")
    (tmp_path / "test_job.py").write_text(TEST)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "120"}
    command = [str(from_wheel), "-m", "pytest", "--junitxml", "junit.xml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=840, check=False)
    text = done.stdout + done.stderr
    print(text)
    assert done.returncode == 1, text
    assert "1 failed, 11 passed, 4 inconclusive" in text.splitlines()[-1], text
    assert "FAILED too-slow.yaml::too-slow::recovery_time" in text
    assert "too-late.yaml::too-late::faults proves nothing" in text
    suite = ET.parse(tmp_path / "junit.xml").getroot()
    assert len(suite.findall(".//failure")) == 1
    assert len(suite.findall(".//error")) == 4
    folders = [path for path in (tmp_path / "torchaos-runs").iterdir() if path.is_dir()]
    assert len(folders) == 3, "the test in Python took the run that was there"
    for folder in folders:
        page = (folder / "report.html").read_text()
        assert len(page) < 500_000
        (verdict,) = (verdict for part, verdict in VERDICTS.items() if part in folder.name)
        assert f"<title>{verdict}: " in page
    assert len(list((tmp_path / "cache" / "torchaos" / "twins").iterdir())) == 1, "one twin for all"
