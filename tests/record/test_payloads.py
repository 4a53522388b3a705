"""Damaged events are not read, and a journal with such events is no evidence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mutating.inputs import RUN

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.events import journal
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.record import RANK_FAILED, Record
from torchaos.harness.record.rundir import RunDir

STEP = next(line for line in (RUN / "events" / "rank0-a1-p30089.jsonl").read_text().splitlines() if '"step"' in line)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that passed, and is not damaged yet."""
    return RunDir(Path(shutil.copytree(RUN, tmp_path / "run")))


def test_what_a_run_writes_is_read() -> None:
    """Every event of a real run, with its faults and its twin, has the shape that is asked for."""
    damaged: list[str] = []
    events = [event for path in RUN.rglob("events") for event in read_events(path, damaged)]
    assert damaged == []
    assert len(events) > 100


@pytest.mark.parametrize(
    "change",
    [{"attempt": [1]}, {"mono_s": "soon"}, {"mono_s": float("nan")}, {"step": 10**400}, {"rank": -1}, {"data": None},
     {"data": {}}, {"data": {**json.loads(STEP)["data"], "pid": True}}, {"kind": "nope"}, {"source": None}],
)  # fmt: skip
def test_damaged_events_are_refused(change: dict[str, object]) -> None:
    """A wrong envelope or payload is a ValueError, and nothing else."""
    assert journal.read(STEP)
    with pytest.raises(ValueError, match=r"\w"):
        journal.read(json.dumps({**json.loads(STEP), **change}))


def test_a_damaged_journal_never_passes(run: RunDir) -> None:
    """What a line said that can't be read is unknown: a run that had passed is inconclusive, and it says which line."""
    assert judge(run).verdict.value == "passed"
    file = run.events / "harness.jsonl"
    file.write_text(file.read_text() + '{"kind": "fault.missed", "source": \n')
    result = judge(run)
    assert result.verdict.value == "inconclusive"
    assert "harness.jsonl:" in result.reason


def test_a_torn_end_and_a_later_version_are_no_damage(run: RunDir) -> None:
    """Half a last line is how a killed rank's file ends, and a later version may write kinds that are unknown here."""
    file = run.events / "rank0-a1-p30089.jsonl"
    later = json.dumps({**json.loads(STEP), "kind": "rank.later"})
    file.write_text(file.read_text() + later + "\n" + STEP[:40])
    assert Record.load(run).damaged == ()


def test_the_end_of_the_log_is_that_of_all_nodes(run: RunDir) -> None:
    """The node that gives up and says why need not be the last. Each attempt's lines stay together, and those of
    earlier submissions are left out."""
    failed = f"E1127 api.py:1] {RANK_FAILED}1) local_rank: 0 (pid: 7)"
    texts = {
        "job-9.log": ["of an earlier submission"],
        "job-9.node1.log": ["of an earlier submission"],
        "job-10.log": ["first error", failed, "second error", failed, "it gives up"],
        "job-10.node1.log": ["a peer is gone", failed, "killed in attempt 1"],
    }
    run.logs.mkdir(exist_ok=True)
    for name, lines in texts.items():
        (run.logs / name).write_text("\n".join(lines) + "\n")
    assert Record.load(run).log_end == (
        "first error", failed, "second error", failed, "a peer is gone", failed, "it gives up", "killed in attempt 1",
    )  # fmt: skip
