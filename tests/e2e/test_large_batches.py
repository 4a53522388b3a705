"""A run whose samples take more than is kept of each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import kill_rank, trainer

pytestmark = [pytest.mark.job, pytest.mark.long]

# The command line with a bound of 2 KB for each of two ranks.
SMALL = """
import sys
from torchaos.harness.protocol import check_sums as allowance
allowance.OF_A_RUN = 4_000
from torchaos.harness.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(("script", "verdict"), [("broken/no_sampler.py", "failed"), ("", "passed")])
def test_replay_beyond_the_bound(
    reference: dict[str, Any], tmp_path: Path, cache: Path, script: str, verdict: str
) -> None:
    """A job that is killed beyond the bound is judged by the sums of its samples: a healthy one passes, and one that
    starts its data over after the restart fails, at the step at which it does."""
    command = reference["command"].replace("--steps 60", "--steps 160 --checkpoint-every 20")
    if script:
        command = command.replace("{jobs}/gpt_ddp.py", trainer(script))
    scenario = kill_rank({**reference, "command": command}, when={"step": 150})
    scenario["assert"] = ["sample_accounting"]
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(scenario))
    report = tmp_path / "all.json"
    done = subprocess.run(
        [sys.executable, "-c", SMALL, "run", str(path), "--out", str(tmp_path / "out"), "--json", str(report)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    (result,) = json.loads(report.read_text())["results"]
    (case,) = [case for case in result["cases"] if case["name"] == "sample_accounting"]
    assert case["verdict"] == verdict, done.stdout
    assert "only the sum of the samples was kept" in case["reason"].lower(), case
    assert "step 141 consumed the samples of step 1." in case["reason"] or not script, case
    assert "the samples take more than the" in done.stdout, done.stdout
