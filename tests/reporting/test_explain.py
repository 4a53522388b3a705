"""The story of recorded runs, word for word, and of damaged runs as far as possible."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from torchaos.harness.analysis.checkpointing.resumed_from import name_of
from torchaos.harness.cli import cli
from torchaos.harness.host import processes
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import EventFile, Kind
from torchaos.harness.record.events.journal import read_journal
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.event_timeline import Turn, happened
from torchaos.harness.reporting.story import Story, story_of, tell, tell_short

RUNS = Path(__file__).parents[1] / "data" / "runs"
GOLDEN = Path(__file__).parent / "golden_stories"
NAMES = sorted(path.name for path in RUNS.iterdir() if path.is_dir())


@cache
def recorded(name: str) -> Story:
    return story_of(RunDir(RUNS / name))


def text_of(story: Story) -> str:
    file = io.StringIO()
    tell(story, Console(file=file, width=110, force_terminal=False))
    return file.getvalue()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(RUNS / "kill", tmp_path / "kill")


@pytest.mark.parametrize("name", NAMES)
def test_the_story_of_a_recorded_run(name: str) -> None:
    """Word for word as in the golden file; UPDATE_GOLDEN=1 writes it anew, to be read in the diff."""
    text = text_of(recorded(name))
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_keeps_its_verdict(name: str) -> None:
    """Judged again by today's rules, each is what it was when it was recorded."""
    then = json.loads((RUNS / name / "result.json").read_text())
    assert recorded(name).title.endswith(f": {then['verdict']}"), recorded(name).why
    assert not recorded(name).doubts


def test_there_is_one_of_each_kind() -> None:
    """Recorded: passed, failed and inconclusive; several faults; a stop condition; a job that never made a step."""
    kinds = {name: recorded(name).title.split()[-1] for name in NAMES}
    assert set(kinds.values()) >= {"passed", "failed", "inconclusive"}
    assert {"kill-twice", "freeze", "no-such-script", "resubmitted", "stale-store", "interrupted"} <= kinds.keys()


def test_the_directory_may_be_elsewhere_and_read_only(copy: Path) -> None:
    """A moved directory that nobody may write to gives the same story."""
    before = text_of(recorded("kill"))
    for path in [*copy.rglob("*"), copy]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert text_of(story_of(RunDir(copy))) == before
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o700)


def test_without_its_final_checkpoint_an_abort_is_not_set_aside(tmp_path: Path) -> None:
    """A real record of an abort on the way out passes; without the inventory, that restart is one too many."""
    copy = shutil.copytree(RUNS / "aborted-at-exit", tmp_path / "copy")
    (copy / "artifacts" / "inventory.json").unlink()
    story = story_of(RunDir(copy))
    assert recorded("aborted-at-exit").title.endswith(": passed")
    assert story.title.endswith(": failed")
    assert any("not set aside, since no whole checkpoint of that step was seen" in sentence for sentence in story.why)


def test_damaged_lines_are_told(copy: Path) -> None:
    """A journal with lines that can't be read: told with a place, and the rest of the story stands."""
    journal = copy / "events" / "harness.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    lines[9] = '{"kind": "rank.up", "source": 7}\n'
    journal.write_text("".join(lines))
    story = story_of(RunDir(copy))
    assert story.title == "kill, seed 0: inconclusive"
    assert "harness.jsonl:10" in " ".join(story.doubts)
    assert "at the time of the run, it was judged passed" in " ".join(story.doubts)
    assert any("process.kill hits rank 1" in moment.text for moment in story.happened)


def test_an_artifact_that_can_t_be_read_does_not_end_the_story(copy: Path) -> None:
    """What happened is told from the journal; that nothing can be judged any more is said, with the verdict of then."""
    (copy / "artifacts" / "inventory.json").write_text("{")
    story = story_of(RunDir(copy))
    assert "inventory" in " ".join(story.doubts) or "can't be judged" in " ".join(story.doubts)
    assert story.title == "kill, seed 0: passed"
    assert any("goes on after step 4" in moment.text for moment in story.happened)


def test_a_run_that_ended_before_it_began(copy: Path) -> None:
    """Only the plan is there: the story says so, and nothing is passed."""
    for part in ("events", "artifacts", "twins"):
        shutil.rmtree(copy / part)
    (copy / "events").mkdir()
    (copy / "result.json").unlink()
    story = story_of(RunDir(copy))
    assert [moment.text for moment in story.happened] == ["nothing was recorded: the run ended before it had begun"]
    assert "The job was never started" in story.seen
    assert "passed" not in story.title


def test_a_run_that_was_ended_before_its_job_was_started(copy: Path) -> None:
    """A signal during the twin: why there is no job is the first thing of what came of it."""
    for path in (copy / "events").iterdir():
        path.unlink()
    journal = EventFile(copy / "events" / "scenario.jsonl", "scenario")
    journal.emit(Kind.STOPPED, {"reason": "SIGTERM was received", "interrupted": True})
    journal.close()
    story = story_of(RunDir(copy))
    assert story.seen[0] == "The job was never started: SIGTERM was received"
    assert story.title == "kill, seed 0: inconclusive"


def short_of(folder: Path, width: int = 100) -> list[str]:
    file = io.StringIO()
    tell_short(RunDir(folder), Console(file=file, width=width, force_terminal=False))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_the_short_story_of_a_recorded_run(name: str) -> None:
    """Without -v: the verdict, why, the turning points with their times, and where the rest is, in at most 20 lines."""
    lines = short_of(RUNS / name)
    assert len(lines) <= 20
    assert recorded(name).title.rpartition(" ")[2].upper() in lines[1]
    turns = [one for one in recorded(name).happened if isinstance(one, Turn)]
    assert sum(f"{one.at_s:9.2f} {one.text[:40]}" in text for one in turns for text in lines) >= min(3, len(turns))
    assert lines[-2].startswith(f" More torchaos explain -v {shlex.quote(str(RUNS / name))}")
    assert len("\n".join(short_of(RUNS / name, 60))) < 3000


def test_the_middle_of_a_long_short_story_is_left_out(copy: Path) -> None:
    """Of many turning points, the first and the last are told, and how many are not."""
    end_s = read_journal(copy / "events")[-1].mono_s  # by the clock of the machine that recorded it
    journal = EventFile(copy / "events" / "observers.jsonl", "observers")
    for _ in range(30):
        journal.emit(Kind.HANG_DECLARED, {"observers": ["log", "stacks"], "ranks": [], "since_s": 0.0}, mono_s=end_s)
    journal.close()
    turns = [one for one in story_of(RunDir(copy)).happened if isinstance(one, Turn)]
    lines = short_of(copy)
    assert len(lines) <= 20
    begin = next(at for at, text in enumerate(lines) if "What happened" in text) + 1
    told = lines[begin : lines.index("", begin)]
    assert "begins with step 1" in told[0]
    assert f"({len(turns) - len(told) + 1} left out here)" in told[len(told) // 2]


def test_a_name_that_says_another_step_is_told(trainer: Any) -> None:
    """The reader sees that name and step contradict each other."""
    run = trainer(every=10).record()
    events = [
        replace(e, data={**e.data, "path": "/job/checkpoints/step-11"})
        if e.data.get("path") == "/job/checkpoints/step-10" else e
        for e in run.events
    ]  # fmt: skip
    told = [one.text for one in happened(replace(run, events=tuple(events)))]
    assert "the checkpoint of step 10 is saved: step-11, a name that says 11" in told
    assert "the checkpoint of step 20 is saved: step-20" in told


def _with_files(run: Any, names: Callable[[int], Sequence[str]]) -> Any:
    """With several files in place of each checkpoint, by its step; each has an event of its own."""
    events: list[Any] = []
    for event in run.events:
        path = str(event.data.get("path", ""))
        files = names(int(path.rpartition("-")[2])) if "step-" in path else [path]
        events += [
            replace(event, seq=len(events) + n, data={**event.data, "path": f"/job/checkpoints/{name}"})
            if "step-" in path else event for n, name in enumerate(files)
        ]  # fmt: skip
    return replace(run, events=tuple(replace(event, source="harness") for event in events))


def test_no_name_is_shortened_to_one_that_does_not_exist(trainer: Any) -> None:
    """A checkpoint of several files is its folder. A single file keeps its whole name, whatever word it begins with."""
    run = trainer(kills=[(8, 1)]).record()
    told = [one.text for one in happened(_with_files(run, lambda step: (f"m{step}/partial_0.pt", f"m{step}/main.pt")))]
    assert "the checkpoint of step 5 is saved: m5" in told
    assert "attempt 1 goes on after step 5, from m5: 2 steps to do again" in told
    told = [one.text for one in happened(_with_files(run, lambda step: ("partial_1.pt",)))]
    assert "the checkpoint of step 5 is saved: partial_1.pt" in told
    assert name_of("/job/checkpoints/partial_1.pt") == "partial_1.pt"


def test_a_file_that_is_not_resumed_from_is_no_checkpoint(trainer: Any) -> None:
    """The best weights are saved at other times than the state, and are not counted with it. If a resume loads them as
    well, such as the base of deltas, the job does resume from them."""
    run = trainer(kills=[(18, 1)], every=2).record()
    run = _with_files(run, lambda step: (f"step-{step}.pt",) if step % 4 == 0 else ("best.pt",))
    loads = [replace(e, data={**e.data, "path": "/job/checkpoints/step-16.pt"})
             if e.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) else e for e in run.events]  # fmt: skip
    short = [one.text for one in happened(replace(run, events=tuple(loads)))]
    assert "the checkpoint of step 16 is saved: step-16.pt" in short
    assert "best.pt is saved after step 14; the job does not resume from it" in short
    first = next(place for place, event in enumerate(loads) if event.kind is Kind.LOAD_BEGIN)
    loads[first:first] = [
        replace(event, data={**event.data, "path": "/job/checkpoints/best.pt"}) for event in loads[first : first + 2]
    ]
    short = [one.text for one in happened(replace(run, events=tuple(loads)))]
    assert not any("best.pt" in line and "does not resume from it" in line for line in short)


def test_a_job_that_goes_back_within_an_attempt_is_told(trainer: Any) -> None:
    """With the file from which it did, unless it had kept the state in memory."""
    for seen, words in (
        (True, "attempt 0 goes back to step 15, from step-15"),
        (False, "attempt 0 goes back to step 15"),
    ):
        run = trainer(raises=(18, 1, 8.0), loads_seen=seen, state_seen=True, named=True).record()
        assert words in [one.text for one in happened(run)]


def test_what_each_observer_thought_is_told(copy: Path) -> None:
    """With what led to it; a change back to no suspicion is not worth a line."""
    told = [
        ("stacks", "blind", "py-spy is not installed"), ("metrics", "hangs", "rank 0 is stopped"),
        ("metrics", "active", ""),
    ]  # fmt: skip
    journal = EventFile(copy / "events" / "observers.jsonl", "observers")
    for observer, opinion, detail in told:
        data = {"observer": observer, "opinion": opinion, "quiet_s": 2.5, "bound_s": 0.8, "detail": detail}
        journal.emit(Kind.HANG_OPINION, data)
    journal.close()
    lines = [moment.text for moment in story_of(RunDir(copy)).happened if "observer" in moment.text]
    assert lines == [
        "the observer stacks is blind: py-spy is not installed",
        "the observer metrics says that the job hangs (no activity for 2.5 s, its bound is 0.8 s): rank 0 is stopped",
    ]


def test_control_characters_do_nothing(copy: Path) -> None:
    """What a journal says can't move the cursor of whoever reads its story."""
    journal = EventFile(copy / "events" / "scenario.jsonl", "scenario")
    journal.emit(Kind.NOTE, {"text": "\x1b[2Jgone \u202egnorw"})
    journal.close()
    text = text_of(story_of(RunDir(copy)))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[2Jgone" in text


def test_without_a_plan_there_is_no_story(tmp_path: Path, copy: Path) -> None:
    """A folder that is no run directory, and one whose plan is damaged, are refused by name."""
    done = CliRunner().invoke(cli, ["explain", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert str(tmp_path) in str(done.exception)
    (copy / "plan.json").write_text("{}")
    with pytest.raises(UsageError, match="kill"):
        story_of(RunDir(copy))


def test_the_command_explains_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory that is named has its story, in order, and the exit code is 0 whatever the verdicts are."""
    monkeypatch.setenv("COLUMNS", "110")
    done = CliRunner().invoke(cli, ["explain", str(RUNS / "kill"), str(RUNS / "missed")])
    assert done.exit_code == 0, done.output
    assert done.output.index(" PASSED  kill ") < done.output.index(" INCONCLUSIVE  missed ")
    whole = CliRunner().invoke(cli, ["explain", "-v", str(RUNS / "kill"), str(RUNS / "missed")]).output
    assert whole.index("kill, seed 0: passed") < whole.index("missed, seed 0: inconclusive")


def test_a_run_that_is_going_on_has_no_verdict(copy: Path) -> None:
    """While its harness is alive and has written no result, `explain` tells what happened so far, and `judge` refuses:
    a fault that has not landed yet is not one that never landed."""
    (copy / "result.json").unlink()
    (copy / "undo").mkdir()
    who = [os.getpid(), processes.ticks_of(os.getpid())]
    line = {"run_id": "x", "harness": who, "reaper": [0, 0], "boot": processes.boot_id(), "host": processes.host()}
    (copy / "undo" / "undo.jsonl").write_text(json.dumps(line) + "\n")
    told = CliRunner().invoke(cli, ["explain", str(copy)]).output
    assert "still going on" in told
    assert "process.kill hits rank 1" in told
    assert not any(word in told for word in ("INCONCLUSIVE", "PASSED", "FAILED", "rollback"))
    with pytest.raises(UsageError, match="still going on"):
        CliRunner().invoke(cli, ["judge", str(copy)], catch_exceptions=False)
