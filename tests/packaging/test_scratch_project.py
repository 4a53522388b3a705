"""A project outside the repository, with the wheel alone: scenarios under pytest, and pages of runs."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from recorded import recorded

from .conftest import run

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
    when: {{{when}}}
assert:
  - recovery_time: {{catch_up: {bound}}}
  - loss_continuity
  - completed
"""
STEP = "step: 12, phase: backward"
VERDICTS = {"kill-rank": "passed", "too-slow": "failed", "too-late": "inconclusive"}
TEST = """
import pytest

@pytest.mark.torchaos("kill-rank.yaml")
def test_recovers(run):
    assert run.recovery.caught_up_s < 600
    assert run.record.history.last_step == run.twin.history.last_step == 30
"""


def clean(folder: Path) -> dict[str, str]:
    """Our environment without what the running pytest put there, and with a state of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    return env | {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "120"}


def test_the_plugin_and_the_page_come_with_the_wheel(from_wheel: Path, tmp_path: Path) -> None:
    """Without anything of the checkout, a scenario is collected and a page is written with all that it needs."""
    (tmp_path / "kill-rank.yaml").write_text(SCENARIO.format(name="kill-rank", when=STEP, bound="60s"))
    env = clean(tmp_path)
    listed = run(from_wheel, "-m", "pytest", "-q", "--collect-only", "kill-rank.yaml", cwd=tmp_path, env=env)
    names = [line for line in listed.splitlines() if "::" in line]
    assert names[0] == "kill-rank.yaml::kill-rank::faults"
    assert len(names) == 5
    recorded(tmp_path / "run")
    run(from_wheel, "-m", "torchaos.harness", "report", tmp_path / "run", cwd=tmp_path, env=env)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<title>passed: kill-then-freeze</title>" in page
    assert "var uPlot=function" in page


@pytest.mark.long
@pytest.mark.job
@pytest.mark.timeout(900)
def test_three_scenarios(from_wheel: Path, tmp_path: Path) -> None:
    """One passes, one fails for a bound that nobody can keep, one is inconclusive since its job ends before the fault:
    pytest, its JUnit file and the pages say so; the three share one twin, and a test in Python the first one's run."""
    whens = {"kill-rank": STEP, "too-slow": STEP, "too-late": "time: 4m"}
    for name, when in whens.items():
        bound = "1ms" if name == "too-slow" else "10m"
        (tmp_path / f"{name}.yaml").write_text(SCENARIO.format(name=name, when=when, bound=bound))
    (tmp_path / "pytest.ini").write_text("[pytest]\ntorchaos_scenarios = *.yaml\n")
    (tmp_path / "test_job.py").write_text(TEST)
    command = [str(from_wheel), "-m", "pytest", "--junitxml", "junit.xml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean(tmp_path), capture_output=True, text=True, timeout=840, check=False
    )
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
