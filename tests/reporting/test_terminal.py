"""A watcher of a run may leave at any time, without an effect on the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


@pytest.mark.slow
def test_a_closed_pipe_changes_no_exit_code(tmp_path: Path) -> None:
    """`torchaos run ... | head -1`: the verdict, the reports and the exit code are what they are without it."""
    scenario = {"scenario": "short", "job": {"command": "true", "world_size": 1}, "assert": ["completed"]}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(scenario))
    reader, writer = os.pipe()
    os.close(reader)
    ends = []
    for number, output in enumerate((subprocess.DEVNULL, writer)):
        command = [
            sys.executable,
            "-m",
            "torchaos.harness",
            "run",
            "short.yaml",
            "short.yaml",
            "--json",
            f"{number}.json",
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        results = json.loads((tmp_path / f"{number}.json").read_text())["results"]
        ends.append((done.returncode, [(one["verdict"], one["reason"]) for one in results]))
    os.close(writer)
    assert ends[0] == ends[1]
