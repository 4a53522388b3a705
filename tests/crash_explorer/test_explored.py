"""All outcomes of an exploration: exit codes, cases, the fatal share, and every form in which they are reported."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from explorations import choice, explored, outcome_of, saves, unconfirmed, unfinished
from rich.console import Console
from saves import Disk

from torchaos.harness.crash_explorer.exploration_summary import (
    ExplorationSummary,
    cases_of,
    files_of,
    result_of,
    script_of,
)
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, OutcomeClass
from torchaos.harness.crash_explorer.state_selection import chosen
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.result import ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting import result_files
from torchaos.harness.reporting import result_files as files
from torchaos.harness.reporting.html import exploration_page as page
from torchaos.harness.reporting.terminal import many_runs as terminal

JOB = PlannedJob(("torchrun", "train.py", "--dir", "{run}/it's here"), "/", {"WORDS": "a b"}, 2, 1, 60.0, "{run}/saved")
PLAN = Plan("made-up", "", 7, JOB, (), ())


def _result(found: ExplorationSummary, *left: str) -> Result:
    return result_of(PLAN, found, "/nowhere", "2026-01-02T03:04:05+00:00", 1.0, left)


def test_all_right(tmp_path: Path) -> None:
    """Only if each state was resumed correctly, and all were tried, is the exit code 0."""
    found = explored(tmp_path)
    assert _result(found).exit_code is ExitCode.PASSED
    assert {case.verdict for case in cases_of(found)} == {Verdict.PASSED}
    assert _result(unfinished(found)).exit_code is ExitCode.INCONCLUSIVE


def test_what_was_not_tried_is_not_green(tmp_path: Path) -> None:
    """Of an exploration that was ended early, no class of failures has passed; of one that tried nothing, nothing is
    said but that, and why."""
    found = unfinished(explored(tmp_path))
    some = replace(found, outcomes=found.outcomes[:1])
    told = {case.name: case for case in cases_of(some)}
    assert told["hangs"].verdict is Verdict.INCONCLUSIVE
    assert told["hangs"].reason == f"none of 1 state; {len(found.choice.states) - 1} were not tried"
    assert _result(some).reason == f"exploration: not finished: {found.unfinished}"
    (case,) = cases_of(replace(found, outcomes=()))
    assert case.reason == f"none of {len(found.choice.states)} states was tried: {found.unfinished}"
    assert _result(replace(found, outcomes=())).exit_code is ExitCode.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kind", "code"),
    [(kind, ExitCode.FAILED) for kind in OutcomeClass if kind not in (OutcomeClass.UNCLEAR, OutcomeClass.RIGHT)]
    + [(OutcomeClass.UNCLEAR, ExitCode.INCONCLUSIVE)],
)
def test_one_state_decides(tmp_path: Path, kind: OutcomeClass, code: ExitCode) -> None:
    """One state of a class is enough for the exit code, and its case in JUnit is red."""
    found = explored(tmp_path, at_3=kind)
    result = _result(found)
    assert result.exit_code is code
    assert result.decided_by == kind.value
    suite = ElementTree.fromstring(result_files.text([result]))[0]
    red = {case.get("name") for case in suite if case.find("failure") is not None or case.find("error") is not None}
    assert red == {kind.value}


def test_a_time_limit_hides_nothing_that_was_seen(tmp_path: Path) -> None:
    """States that only forked ranks have shown to be wrong are counted in the headline, the table, the share of time,
    the bar and the JSON, and are said not to be confirmed. Without a confirmed one, the exit code is 2."""
    wrong = {f"at_{number}": OutcomeClass.WRONG for number in range(1, 6)}
    seen = explored(tmp_path, **wrong, at_6=OutcomeClass.HANGS)
    own = [one.state for one in seen.of(OutcomeClass.WRONG)]
    found = unconfirmed(seen)
    result = _result(found)
    assert (result.exit_code, result.verdict) == (ExitCode.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    many = f"silently wrong: {len(own)} states (not confirmed by a cold start), such as {own[0]}"
    assert result.reason.startswith(many)
    assert result.reason.endswith("; also seen: hangs (1)")
    assert found.fatal_s == found.unconfirmed_fatal_s == seen.fatal_s > 0 == seen.unconfirmed_fatal_s
    raw = json.loads(json.dumps(files.to_json(found, result), allow_nan=False))
    assert (raw["classes"]["silently wrong"], raw["tried"]) == (len(own), len(seen.outcomes))
    assert raw["unconfirmed"] == {"silently wrong": len(own), "hangs": 1}
    assert [one["confirmed"] for one in raw["outcomes"]].count(False) == len(own) + 1
    paper = io.StringIO()
    terminal.show(found, result, Console(file=paper, width=300))
    told = " ".join(paper.getvalue().split())
    assert f"silently wrong {len(own)} hangs 1" in told, "without the words of the headline, and no empty class"
    assert "hangs 1 1 state (not confirmed by a cold start), such as" in told
    assert told.count(seen.of(OutcomeClass.WRONG)[0].reason) == 1
    assert "of this not confirmed by a cold start" in told
    html = page.text(found, result, tmp_path)
    assert html.count('<rect class="x-wrong unconfirmed"') >= len(own), "the bar is not white there"
    assert "x-wrong unconfirmed" not in page.text(seen, _result(seen), tmp_path)


def test_one_confirmed_state_makes_its_class_failed(tmp_path: Path) -> None:
    """It is told before the others, also before a state with fewer operations; a worse class that is not confirmed is
    told beside it, and decides nothing."""
    found = explored(
        tmp_path,
        at_2=OutcomeClass.WRONG,
        at_3=OutcomeClass.WONT_START,
        at_5=OutcomeClass.WONT_START,
        at_6=OutcomeClass.WONT_START,
    )
    last = found.of(OutcomeClass.WONT_START)[-1].state
    result = _result(unconfirmed(found, last))
    assert (result.exit_code, result.decided_by) == (ExitCode.FAILED, "won't start")
    assert result.reason.startswith(f"won't start: 3 states (2 of them not confirmed by a cold start), such as {last}")
    assert result.reason.endswith("; also seen: silently wrong (1)")
    smallest = unconfirmed(found, last).smallest
    assert smallest
    assert smallest.state == last
    verdicts = {case.name: case.verdict for case in cases_of(unconfirmed(found, last))}
    assert verdicts["silently wrong"] is Verdict.INCONCLUSIVE


def test_what_could_not_be_undone_comes_first(tmp_path: Path) -> None:
    """A mount that is left makes the exit code 4, whatever was found."""
    result = _result(explored(tmp_path), "the folder is still mounted")
    assert (result.exit_code, result.reason) == (ExitCode.ROLLBACK, "the folder is still mounted")


def test_the_fatal_share_is_of_the_time_that_was_tried(tmp_path: Path) -> None:
    """Each operation takes a second: two states of two seconds in all, of which one is fatal, among all others."""
    found = explored(tmp_path, at_3=OutcomeClass.WONT_START, at_5=OutcomeClass.LOST_WORK)
    fatal = [one for one in found.outcomes if one.kind is OutcomeClass.WONT_START]
    assert fatal
    assert found.fatal_s == sum(until - since for one in fatal for since, until in one.moments) > 0
    assert found.tried_s == found.recording.ended_s
    assert found.fatal_share == found.fatal_s / found.tried_s
    assert explored(tmp_path / "none").fatal_share == 0


def test_the_smallest_state_of_the_worst_class(tmp_path: Path) -> None:
    """A state that goes on wrongly is told before one that does not start, however few operations that one has."""
    found = explored(tmp_path, at_1=OutcomeClass.WONT_START, at_5=OutcomeClass.WRONG, at_6=OutcomeClass.WRONG)
    assert found.smallest
    assert (found.smallest.kind, found.smallest.operations) == (OutcomeClass.WRONG, 5)


def test_outcomes_go_through_json(tmp_path: Path) -> None:
    """An outcome that is read back is the same: an exploration goes on after those that it has."""
    one = explored(tmp_path, at_3=OutcomeClass.LOST_WORK).outcomes[2]
    one = replace(one, files=(("a", "torn"),), mended=True)
    assert Outcome.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_equal_files_are_tried_once_for_each_model(tmp_path: Path) -> None:
    """The death of processes and a loss of power may leave the same files at other moments, and mean something else."""
    recording = saves(tmp_path)
    models = ["process-death", "power-loss-strict"]
    both = chosen(recording, models, {}, None, 0)
    tried = [(state.digest, state.model) for state in both.states]
    assert len(set(tried)) == len(tried)
    alone = [len(chosen(recording, [model], {}, None, 0).states) for model in models]
    assert len(tried) == both.in_all == sum(alone) > both.there_are >= max(alone)
    few = chosen(recording, models, {}, 4, 3)
    assert len({state.digest for state in few.states}) == 4
    assert [state.name for state in chosen(recording, models, {}, 4, 3).states] == [state.name for state in few.states]


@pytest.mark.parametrize(
    ("operations", "last", "rng_2"),
    [(2, "torn: 100 of 150 bytes", "missing"), (9, "empty", "missing"), (13, "complete", "empty")],
)
def test_the_story_names_what_is_torn(tmp_path: Path, operations: int, last: str, rng_2: str) -> None:
    """In the middle of a save of a file, it is torn or empty, and a file that comes after it is missing."""
    recording = saves(tmp_path)
    state = next(state for state in choice(recording).states if state.operations == operations)
    told = dict(files_of(state, recording))
    assert (told["last.pt"], told["rng-2"]) == (last, rng_2)


def test_the_story_names_a_missing_folder_without_its_files(tmp_path: Path) -> None:
    """The next save may come so soon that it is told with this one: its folder is missing, and that says enough."""
    disk = Disk(Blobs(tmp_path / "blobs"))
    for number in (1, 2):
        disk.rank(0).mkdir(f"step-{number}")
        disk.rank(0).save(f"step-{number}/a", b"a")
        disk.rank(0).save(f"step-{number}/b", b"b")
    recording = disk.recording()
    states = choice(recording).states
    state = next(one for one in states if {path: file.size for path, file in one.tree.files.items()} == {"step-1/a": 1})
    told = {"step-1": "a folder", "step-1/a": "complete", "step-1/b": "missing", "step-2": "missing"}
    assert dict(files_of(state, recording)) == told


def test_the_page_and_the_terminal_tell_the_smallest_state(tmp_path: Path) -> None:
    """Both have the classes, the share of time, the story and the script; text of the job is no markup."""
    found = explored(tmp_path / "blobs", at_3=OutcomeClass.WONT_START)
    folder = tmp_path / "failing" / "state"
    folder.mkdir(parents=True)
    (folder / "reproduce.sh").write_text("echo <b>")
    outcomes = [
        replace(one, run_dir=str(folder), files=(("last.pt", "torn: 100 of 150 bytes"),), mended=False)
        if one.kind is OutcomeClass.WONT_START else one for one in found.outcomes
    ]  # fmt: skip
    found = replace(found, outcomes=tuple(outcomes), notes=("a note",))
    html = page.text(found, _result(found), tmp_path)
    assert "<script>," not in html.replace("why it is won't start &lt;script&gt;", "")
    for text in ("torn: 100 of 150 bytes", "echo &lt;b&gt;", "sh failing/state/reproduce.sh", "A second start fails"):
        assert text in html
    assert html.count('class="op ') == len(found.recording.operations)
    paper = io.StringIO()
    terminal.show(found, _result(found), Console(file=paper, width=100))
    for text in ("won't start", "of the run's time", "torn: 100 of 150 bytes", "reproduce.sh", "a note"):
        assert text in paper.getvalue()
    assert len(paper.getvalue().splitlines()) <= 22


def test_a_state_is_a_line(tmp_path: Path) -> None:
    """The progress line of a state has the beginning of its reason; the report has the whole."""
    (found,) = explored(tmp_path, at_3=OutcomeClass.HANGS).of(OutcomeClass.HANGS)[:1]
    told = terminal.tell_outcome(replace(found, reason="it waits for a rank " * 20), 3, 17)
    assert "it waits for a rank it waits" in told
    assert "..." in told
    assert len(told) < 200


def test_json_has_times_since_the_beginning(tmp_path: Path) -> None:
    """Other programs get the counts, the share and each outcome, and no time of this machine's clock."""
    found = explored(tmp_path, at_3=OutcomeClass.HANGS)
    found = replace(found, recording=replace(found.recording, began_s=100.0, ended_s=200.0))
    raw = json.loads(json.dumps(files.to_json(found, _result(found)), allow_nan=False))
    assert raw["classes"] == {"hangs": 1, "resumed correctly": len(found.outcomes) - 1}
    assert raw["fatal_share"] == found.fatal_share
    own = next(one for one in raw["outcomes"] if one["kind"] == "hangs")
    assert own["moments"][0][0] == found.of(OutcomeClass.HANGS)[0].moments[0][0] - 100.0


def test_the_script_starts_the_job_on_the_files(tmp_path: Path) -> None:
    """The script copies the state into a fresh folder and starts the command with its environment, without torchaos."""
    there = tmp_path / "kept"
    (there / "state").mkdir(parents=True)
    (there / "state" / "last.pt").write_text("torn")
    command = ("sh", "-c", 'echo "$WORDS" && cat "$0/last.pt"', "{run}/it's/saved")
    job = replace(JOB, command=command, cwd=str(tmp_path), checkpoints="{run}/it's/saved")
    now = RunDir(tmp_path / "now")
    outcome = outcome_of(choice(saves(tmp_path)).states[0], OutcomeClass.WONT_START, "it\nfails")
    (there / "reproduce.sh").write_text(script_of(job, now, now.job / "it's" / "saved", outcome))
    done = subprocess.run(["sh", there / "reproduce.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a b\ntorn"), done.stderr
