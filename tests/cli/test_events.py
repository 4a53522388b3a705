"""`torchaos events`: the journal as lines of JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.protocol.wire import EventFile, Phase

RUNS = Path(__file__).parents[1] / "data" / "runs"


def test_all_events_in_order_of_time(tmp_path: Path) -> None:
    """Events in JSON, as all were in old journals, and packed ones are printed alike; a damaged line is named."""
    run = tmp_path / "run"
    shutil.copytree(RUNS / "kill", run)
    before = sum(len(path.read_bytes().splitlines()) for path in run.glob("events/*.jsonl"))
    file = EventFile(run / "events" / "rank7.jsonl", "rank7-a0-p1", 7, 0)
    file.emit_step(1, [0.25], [0.1], 1, None, False, bytes(6), (3,), {Phase.DATA: 0.5})
    file.close()
    with open(run / "events" / "rank7.jsonl", "ab") as damaged:
        damaged.write(b"!rank7-a0-p1 7 0 AAAA\n")
    done = CliRunner().invoke(cli, ["events", str(run)])
    assert done.exit_code == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    assert len(found) == before + 1
    assert [event["mono_s"] for event in found] == sorted(event["mono_s"] for event in found)
    (packed,) = (event for event in found if event["source"] == "rank7-a0-p1")
    assert packed["kind"] == "step"
    assert packed["data"]["samples"] == ["000000000000"]
    assert packed["data"]["phases"] == {"data": 0.5}
    assert "rank7.jsonl:2 is damaged" in done.stderr
