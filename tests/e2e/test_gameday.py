"""A game day, run for real: a ready one, cut down to a quarter of a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import REPOSITORY, left_over

pytestmark = pytest.mark.job


def test_a_short_day(tmp_path: Path, cache: Path) -> None:
    """Ranks die, and the job goes on from its checkpoints. The day passes by what its one round saw, says so in a few
    lines, and leaves no process."""
    day = REPOSITORY / "scenarios" / "gamedays" / "quarter-hour.yaml"
    changes = {"duration": "15s", "arrivals": "{every: 5s}", "rest": "1s"}
    changes |= {"score": "{lost_steps: 1000}"}  # nothing that a busy machine decides
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "gameday", str(day), *sets, "--keep", "--out", str(tmp_path)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 15, done.stdout
    assert "round 0: passed" in done.stderr, "progress goes to standard error"
    (folder,) = tmp_path.iterdir()
    score = json.loads((folder / "rounds" / "000" / "score.json").read_text())
    assert {fault["outcome"] for fault in score["faults"]} == {"recovered"}, score
    assert "passed" in (folder / "report.html").read_text()
    assert left_over(next((folder / "rounds" / "000" / "run").iterdir())) == []
