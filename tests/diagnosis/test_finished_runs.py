"""`torchaos diagnose` of a run directory whose job has ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchaos.harness.agent.stamps import Stamps
from torchaos.harness.cli import cli

RUNS = Path(__file__).parents[1] / "data" / "runs"


@pytest.mark.parametrize(("run", "culprits"), [("kill", []), ("freeze", [0])])
def test_a_job_that_ended_well_hangs_no_more(run: str, culprits: list[int], tmp_path: Path) -> None:
    """Stamps that a rank left open are no hang if the job ended with exit code 0; without that end, they are."""
    folder = Path(shutil.copytree(RUNS / run, tmp_path / run))
    stamps = folder / "agent" / "stamps"
    stamps.mkdir(parents=True)
    for rank in (0, 1):
        writer = Stamps(stamps / f"rank{rank}-a0-p{rank + 1}.stamps", rank, 0, rank + 1)
        group = writer.group("0", (0, 1))
        first, _second = (writer.begin("barrier", group, 0, 5) for _ in range(2))
        if rank == 1:
            writer.ended(first)
        writer.close()
    done = CliRunner().invoke(cli, ["diagnose", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["culprits"] == culprits
