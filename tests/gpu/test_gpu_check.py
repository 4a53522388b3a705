"""ci/gpu-check: its rows exist, all of them fit into its time, and a call can be continued."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "ci" / "gpu-check"


def test_every_row_is_there_and_all_of_them_fit() -> None:
    """A row is a ready scenario or a program, and all time limits together are less than 25 minutes."""
    rows = runpy.run_path(str(PROGRAM))["ROWS"]
    folder = PROGRAM.parent / "gpu_check"
    for name in rows:
        place = Path(str(files("torchaos.scenarios") / f"{name}.yaml")) if "/" in name else folder / f"{name}.py"
        assert place.is_file(), f"{name}: there is no {place}"
    shared = {"facts", "job", "row", "scenario"}
    assert {path.stem for path in folder.glob("*.py")} - shared == {name for name in rows if "/" not in name}
    assert sum(rows.values()) <= 25 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: ci/gpu-check itself shows more")
def test_without_a_gpu_a_row_is_not_possible_and_is_not_run_again(tmp_path: Path) -> None:
    """The table says why, and never "pass". A second call takes the result that is kept; --again does not."""
    command = [sys.executable, str(PROGRAM), "--only", "dcgm", "--slow", "20", "--keep", str(tmp_path)]

    def call(*options: str) -> tuple[int, str]:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=170)
        return done.returncode, done.stdout

    code, said = call()
    assert code == 0, said
    assert "dcgm: not possible here: there is no GPU" in said
    assert "| `dcgm` | not possible here |" in (tmp_path / "table.md").read_text()
    kept = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**kept, "dcgm": {**kept["dcgm"], "found": "as it was"}}))
    assert call() == (0, "")
    assert "as it was" not in call("--again")[1]


def test_a_row_that_is_not_over_in_time_failed(tmp_path: Path) -> None:
    """So did one that ended by a signal. The table says which, with the last line of its output."""
    check = runpy.run_path(str(PROGRAM))
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "slow.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
    (folder / "dies.py").write_text("import os\nprint('so far', flush=True)\nos.abort()\n")
    check["run"].__globals__["FOLDER"] = folder
    slow = check["run"]("slow", 2.0, {}, tmp_path)
    assert (slow["result"], slow["found"]) == ("fail", "not over after 2 s; last line: waiting")
    dies = check["run"]("dies", 60.0, {}, tmp_path)
    assert (dies["result"], dies["found"]) == ("fail", "it ended by signal 6; last line: so far")
