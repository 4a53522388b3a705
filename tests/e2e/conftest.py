"""Runs the command line as a user does, and returns its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import REPOSITORY, Outcome, RunScenario


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """One cache of twins for the whole session, so that scenarios with the same job share one, also those of another
    worker."""
    at_its_side = hasattr(request.config, "workerinput")
    return (tmp_path_factory.getbasetemp().parent if at_its_side else tmp_path_factory.getbasetemp()) / "cache"


@pytest.fixture
def torchaos(tmp_path: Path, cache: Path) -> RunScenario:
    within, of_files = tmp_path, ("--set", f"job.cwd={REPOSITORY}")  # all in one folder, so that they share their twins

    def run(scenario: Path | dict[str, Any], *options: str) -> Outcome:
        path = scenario if isinstance(scenario, Path) else within / "scenario.yaml"
        if isinstance(scenario, Path):
            options = (*of_files, *options)
        else:
            path.write_text(yaml.safe_dump(scenario, sort_keys=False))
        number = len(list(within.glob("out*")))
        out, junit, report = within / f"out{number}", within / f"junit{number}.xml", within / f"all{number}.json"
        command = [sys.executable, "-m", "torchaos.harness", "run", str(path), "--out", str(out)]
        done = subprocess.run(
            [*command, "--junit", str(junit), "--json", str(report), *options],
            env={**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "120"},
            capture_output=True, text=True, timeout=600, check=False, cwd=within,
        )  # fmt: skip
        results = json.loads(report.read_text())["results"] if report.exists() else []
        folder = next(iter(out.iterdir())) if out.exists() else within
        return Outcome(done.returncode, done.stdout + done.stderr, results[0] if results else {}, folder, junit)

    return run


@pytest.fixture
def reference() -> dict[str, Any]:
    """The reference job: 60 steps, a checkpoint every 10."""
    command = (
        "torchrun --nproc-per-node 2 --max-restarts 3 {jobs}/gpt_ddp.py --steps 60 --checkpoint-dir {run}/checkpoints"
    )
    return {"command": command, "checkpoints": {"path": "{run}/checkpoints"}}
