"""`torchaos diagnose` of a run directory whose job has ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.protocol.collective_stamps import Stamps

RUNS = Path(__file__).parents[1] / "data" / "runs"


def _stamped(run: str, folder: Path, barriers: int) -> dict[str, Any]:
    """The diagnosis of a kept run, with stamps of barriers: rank 0 is still in all, rank 1 has ended the first."""
    shutil.copytree(RUNS / run, folder)
    stamps = folder / "agent" / "stamps"
    stamps.mkdir(parents=True)
    for rank in (0, 1):
        writer = Stamps(stamps / f"rank{rank}-a0-p{rank + 1}.stamps", rank, 0, rank + 1)
        group = writer.group("0", (0, 1))
        first, *_ = (writer.begin("barrier", group, 0, 5) for _ in range(barriers))
        if rank == 1:
            writer.ended(first)
        writer.close()
    done = CliRunner().invoke(cli, ["diagnose", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_late_rank_for_which_nobody_waits(tmp_path: Path) -> None:
    """It is a suspect only, and the note says why."""
    found = _stamped("freeze", tmp_path / "run", 1)
    assert (found["culprits"], found["suspects"], found["problems"]) == ([], [0], ["no other rank waits"])


@pytest.mark.parametrize(("run", "culprits"), [("kill", []), ("freeze", [0])])
def test_a_job_that_ended_well_hangs_no_more(run: str, culprits: list[int], tmp_path: Path) -> None:
    """Stamps that a rank left open are no hang if the job ended with exit code 0; without that end, they are."""
    assert _stamped(run, tmp_path / "run", 2)["culprits"] == culprits
