"""A journal with missing events: it must not look like a verdict on the job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.events.journal import Gaps
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.record.rundir import RunDir

RUNS = Path(__file__).parents[1] / "data" / "runs"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded run that passed: rank 1 is killed, and attempt 1 goes on to the end."""
    shutil.copytree(RUNS / "kill", tmp_path / "run")
    assert judged(tmp_path / "run").verdict is Verdict.PASSED
    return tmp_path / "run"


def judged(folder: Path) -> Result:
    return judge(RunDir(folder))


def keep(path: Path, which: Callable[[dict[str, Any]], bool]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if which(json.loads(line))))


def files(folder: Path, pattern: str) -> list[Path]:
    found = sorted((folder / "events").glob(pattern))
    assert found, pattern
    return found


@pytest.mark.parametrize("pattern", ["rank*-a0-*", "rank*-a1-*"])
def test_steps_that_were_cut_out(run: Path, pattern: str) -> None:
    """Two steps, of both ranks: that they never took place is not what the run shows."""
    for path in files(run, pattern):
        keep(path, lambda event: event["step"] not in (1, 2))
    result = judged(run)
    assert result.verdict is Verdict.INCONCLUSIVE, result
    assert result.reason.startswith("the journal is damaged: event")
    assert f"of {files(run, pattern)[0].stem} " in result.reason


def test_the_first_and_the_last_lines(run: Path) -> None:
    """What comes before the first line of a file is missing as what lies between two of them."""
    (path,) = files(run, "rank0-a1-*")
    keep(path, lambda event: event["seq"] > 2)
    assert f"events 0 to 2 of {path.stem} are missing" in judged(run).reason


def test_files_that_are_gone(run: Path) -> None:
    """Both of attempt 1: its ranks ended with exit code 0, so that it is not the job that never got further."""
    for path in files(run, "rank*-a1-*"):
        path.unlink()
    result = judged(run)
    assert result.verdict is Verdict.INCONCLUSIVE, result
    assert "rank 0 ended well in attempt 1, and all of its events are missing" in result.reason


@pytest.mark.parametrize(("where", "whose"), [(".", "the journal"), ("twins/0", "the journal of a twin")])
def test_an_end_that_was_cut_off(run: Path, where: str, whose: str) -> None:
    """The last steps of both ranks, of the run or of its twin: neither is shorter than the other for that."""
    newest = "rank*-a1-*" if where == "." else "rank*"
    for path in files(run / where, newest):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-4]))
    result = judged(run)
    assert result.verdict is Verdict.INCONCLUSIVE, result
    attempt = 1 if where == "." else 0
    assert f"{whose} is damaged: rank 0 ended well in attempt {attempt}, and its last events" in result.reason


def test_a_job_that_leaves_without_cleaning_up(run: Path) -> None:
    """By os._exit, in each of its runs: nothing is missing, for there never was a last event."""
    for path in (*files(run, "rank*"), *files(run / "twins" / "0", "rank*")):
        keep(path, lambda event: event["kind"] != "agent.ended")
    assert judged(run).verdict is Verdict.PASSED


def test_a_job_that_leaves_without_cleaning_up_only_when_it_ends_well(run: Path) -> None:
    """By os._exit at its very end. A rank that died of an error cleaned up, and that shows nothing for the others."""
    for path in (*files(run, "rank*-a1-*"), *files(run / "twins" / "0", "rank*")):
        keep(path, lambda event: event["kind"] != "agent.ended")
    assert any(b'"agent.ended"' in path.read_bytes() for path in files(run, "rank*-a0-*"))
    assert judged(run).verdict is Verdict.PASSED


def test_a_rank_that_leaves_at_once_when_it_is_asked_to(run: Path) -> None:
    """On SIGTERM it saves and calls os._exit(0): that its attempt has no last event is no matter, another one has."""
    (harness,) = files(run, "harness*")
    (rank,) = files(run, "rank0-a0-*")
    keep(rank, lambda event: event["kind"] != "agent.ended")
    text = harness.read_bytes()
    assert b'"exit_code":-15' in text
    harness.write_bytes(text.replace(b'"exit_code":-15', b'"exit_code":0'))
    assert judged(run).verdict is Verdict.PASSED


def test_events_of_a_later_version_are_not_missing(run: Path) -> None:
    """Their kind is not known here, and their number is."""
    (path,) = files(run, "rank0-a1-*")
    path.write_bytes(path.read_bytes().replace(b'"checkpoint.save_begin"', b'"checkpoint.save_planned"'))
    assert "damaged" not in judged(run).reason


def test_a_killed_process_may_owe_one_line() -> None:
    """One thread had taken a number when the kill came, and another one still wrote; further back, or of more than one
    number, or in a process that came to its end, it is a gap."""

    def said(numbers: list[int], ended: bool = False) -> list[str]:
        gaps = Gaps()
        for number in numbers:
            gaps.note("rank0", number, "agent.ended" if ended and number == numbers[-1] else "step")
        return gaps.in_words()

    assert said([0, 1, 2, 4]) == []
    assert said([0, 1, 2, 4], ended=True) == ["event 3 of rank0 is missing"]
    assert said([0, 1, 2, 5]) == ["events 3 to 4 of rank0 are missing"]
    assert said([0, 2, 3, 4, 5, 6, 7]) == ["event 1 of rank0 is missing"]
    assert said([2, 0, 1, 1]) == [], "in another order, or twice, they are all there"
