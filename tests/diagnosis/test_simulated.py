"""A sample of `python lab/campaigns/blame.py`: dumps of a simulated job, and the ranks that the diagnosis names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_hangs_and_healthy_moments(tmp_path: Path) -> None:
    """With the files' times nobody is named in a healthy job, and nearly every host that stopped is, where all dumps
    are whole; as copies these are judged alike."""
    table = tmp_path / "found.json"
    campaign = REPOSITORY / "lab" / "campaigns" / "blame.py"
    words = [sys.executable, str(campaign), "--hangs", "24", "--healthy", "16", "--seed", "2", "--json", str(table)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in table.read_text().splitlines()]
    assert len(found) == 2 * (24 + 16)
    stopped = [one for one in found if one["kind"] in ("host", "half done") and not one["spoilt"]]
    exact = [one for one in stopped if one["said"] == "exact"]
    assert len(stopped) >= 10
    assert len(exact) >= 0.8 * len(stopped), [one for one in stopped if one not in exact]
