"""The parts of the recorded run that a resume gets besides events: the manifests of saves, and the time of death."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explorations import choice, saves
from resumes import ENDED, ENOUGH, LATER_S, Trainer, next_attempt, recorded, resumed

from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.resume_outcomes import OutcomeClass, seen_in
from torchaos.harness.crash_explorer.resume_runs import (
    ResumeRuns,
    assertions_for_resumes,
    checkpoints_in,
    judged,
    saves_of,
)
from torchaos.harness.crash_explorer.synthetic_crash import truncate, truncate_all
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.plan import Named
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir


def _in_place(trainer: Any = None) -> Record:
    """A run that saves under the same name each time."""
    run = recorded(trainer)
    return replace(run, events=tuple(map(_under_one_name, run.events)))


def _under_one_name(event: Event) -> Event:
    return replace(event, data={**event.data, "path": "/job/checkpoints/last.pt"}) if "path" in event.data else event


def test_a_manifest_is_of_its_save_whenever_it_was_written(tmp_path: Path) -> None:
    """Digests are added in the background, also after the next save of the same file: the manifests of a file are told
    apart by their order, and not by the time at which they were written."""
    run = _in_place()
    ends = [event.mono_s for event in run.events if event.kind is Kind.SAVE_END and event.rank == 0]
    for number in range(len(ends)):
        raw = {"save": "/job/checkpoints/last.pt", "wall_s": 5000.0}
        (tmp_path / f"rank0-attempt0-{number}-1000.json").write_text(json.dumps(raw))
    found = saves_of(tmp_path, run)
    assert [found[path][1] for path in sorted(found, key=lambda path: int(path.name.split("-")[2]))] == ends
    (tmp_path / "rank0-attempt0-99-1000.json").write_text(json.dumps({"save": "/job/checkpoints/last.pt", "wall_s": 7}))
    assert {saved_s for _written_s, saved_s in saves_of(tmp_path, run).values()} == {None}


def _inventory(root: str, step: int) -> dict[str, Any]:
    one = {
        "path": "last.pt", "format": "torch", "step": step, "complete": True, "loadable": True, "problem": None,
        "tensors": {"w": str(step)}, "values": {},
    }  # fmt: skip
    return {"root": root, "checkpoints": [one], "unread": [], "problem": None}


def test_a_file_of_another_step_is_not_compared(tmp_path: Path) -> None:
    """A job that overwrites one file was ended after step 17, with the file of step 15; the twin's is of step 30. The
    twin's file is left out, and nothing is called too old or missing."""
    run = resumed(tmp_path / "events", 12, Trainer(kills=[(13, 0)]), [ENOUGH], until=17)
    run = replace(run, events=tuple(map(_under_one_name, run.events)), plan=_with_inventory(run))
    (tmp_path / "last.pt").write_text("")
    run = replace(run, artifacts={"inventory": _inventory("/job/checkpoints", 15)})
    twin = replace(_in_place(), artifacts={"inventory": _inventory("/job/checkpoints", 30)})
    ours, (theirs,) = truncate_all(run, [twin], 2)
    assert theirs.artifacts["inventory"]["checkpoints"] == []
    assert [save.global_step for save in theirs.history.saves] == [5, 10, 15]
    assert verdict_of(ours, [theirs], "").verdict is not Verdict.FAILED


def test_the_clock_of_files_is_late(tmp_path: Path) -> None:
    """The job was ended just after it had replaced its file. A file's time comes from a clock that ticks each few
    milliseconds, so it is before the end of the step after which the file was saved. The file is left out."""
    run = resumed(tmp_path / "events", 12, Trainer(kills=[(13, 0)]), [ENOUGH], until=17)
    (tmp_path / "last.pt").write_text("")
    cut = truncate(run.events, 2)
    assert cut
    saved_s = cut.wall_s - 0.003
    os.utime(tmp_path / "last.pt", (saved_s, saved_s))
    run = replace(run, artifacts={"inventory": _inventory(str(tmp_path), 15)})
    ours, _twins = truncate_all(run, [], 2)
    assert ours.artifacts["inventory"]["checkpoints"] == []


@pytest.mark.parametrize(("whole", "ago_s", "stays"), [(True, 900.0, False), (False, 900.0, True), (True, 0.05, True)])
def test_a_torn_file_that_was_superseded_after_the_cut(
    tmp_path: Path, whole: bool, ago_s: float, stays: bool
) -> None:  # fmt: skip
    """A death left a torn file. The job saved its next checkpoint just after the last step that is judged, and removed
    the one before, as a job does that keeps only its newest checkpoint. What was there at that step is not known, so
    the torn file is left out, unless the next checkpoint is not whole either. A file that the resumed job itself left
    torn stays."""
    run = resumed(tmp_path / "events", 12, Trainer(kills=[(13, 0)]), [ENOUGH], until=20)
    run = replace(run, events=tuple(replace(event, wall_s=event.mono_s) for event in run.events))
    cut = truncate(run.events, 2)
    assert cut
    for name, changed_s in (("step=12.pt", cut.wall_s - ago_s), ("step=20.pt", cut.wall_s + 1)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (changed_s, changed_s))
    made = _inventory(str(tmp_path), 20)
    newest = {**made["checkpoints"][0], "path": "step=20.pt", "complete": whole, "loadable": whole}
    torn = {**newest, "path": "step=12.pt", "step": 12, "complete": False, "loadable": False, "problem": "empty"}
    run = replace(run, artifacts={"inventory": {**made, "checkpoints": [torn, newest]}})
    ours, _twins = truncate_all(run, [], 2)
    left = [entry["path"] for entry in ours.artifacts["inventory"]["checkpoints"]]
    assert left == (["step=12.pt"] if stays else [])


@pytest.mark.parametrize(("saves_seen", "empty", "died_after", "kind"), [
    (True, False, 3, OutcomeClass.RIGHT), (False, False, 3, OutcomeClass.UNCLEAR), (False, True, 3, OutcomeClass.RIGHT),
    (True, True, 12, OutcomeClass.LOST_WORK), (False, False, 0, OutcomeClass.RIGHT),
])  # fmt: skip
def test_nothing_is_lost_before_the_first_checkpoint(
    tmp_path: Path, saves_seen: bool, empty: bool, died_after: int, kind: OutcomeClass
) -> None:  # fmt: skip
    """The job died after step 3, began again from scratch, and was ended before its first save was judged: without a
    checkpoint nothing could be restored or lost, if the saves of the recorded run were seen, if there was no file, or
    if no step had been made. After step 12, 10 steps were lost."""
    run = resumed(tmp_path / "events", died_after, Trainer(kills=[(3, 0)]), [ENOUGH], until=4 if died_after < 5 else 14)
    before = recorded() if saves_seen else _without_saves(recorded())
    asserts = (*run.plan.asserts, Named("state_restored", {}))
    run = replace(run, plan=replace(run.plan, asserts=asserts))
    twin = replace(recorded(Trainer(state_seen=True)), artifacts={})
    ours, twins = truncate_all(run, [twin], 2)
    result = judged(ours, twins, before, "", empty)
    seen = seen_in(ours, result, 30, False)
    assert seen.kind is kind, seen.reason


def test_the_job_died_before_a_rank_was_up(tmp_path: Path) -> None:
    """A death while the launcher was starting hits no rank. The job then starts as usual, which is right. If it does
    not train then, it hangs."""
    run = recorded()
    first_s = min(process.up_s for attempt in run.history.attempts for process in attempt.ranks.values())
    synthetic_crash.write(tmp_path, run, first_s - 0.001, {}, LATER_S)
    start = Event(Kind.JOB_STARTED, "harness", 0, 0, LATER_S, data={"submission": 0, "pid": 60})
    own = next_attempt(Trainer(kills=[(3, 0)]).record(), LATER_S, 30, 1)
    end = Event(Kind.JOB_EXITED, "harness", 1, 0, own[-1].mono_s + 1, data=ENDED[1])
    events = sorted((*read_events(tmp_path), start, *own, end), key=lambda event: event.mono_s)
    again = synthetic_crash.without_missed_death(Record(synthetic_crash.with_death(run.plan), tuple(events), {}))
    ours, twins = truncate_all(again, [recorded()], 2)
    found = seen_in(ours, judged(ours, twins, run, ""), 30, False)
    assert (found.kind, found.from_step) == (OutcomeClass.RIGHT, 0), found.reason
    idle = replace(again, events=tuple(one for one in again.events if one is not end and one.kind is not Kind.STEP))
    assert seen_in(idle, judged(idle, twins, run, ""), 30, True).kind is OutcomeClass.HANGS


@pytest.mark.parametrize(("until", "seen", "ended", "kind"), [
    (14, False, ENOUGH, OutcomeClass.UNCLEAR),  # from scratch, and nothing shows whether a checkpoint was lost
    (14, True, ENOUGH, OutcomeClass.LOST_WORK), (11, True, ENDED, OutcomeClass.WONT_START),  # it had reached step 12
    (11, True, (Kind.STOPPED, {"reason": "nothing happened", "interrupted": False}), OutcomeClass.HANGS),
    (30, True, ENDED, OutcomeClass.RIGHT),
])  # fmt: skip
def test_the_job_died_again_before_a_rank_was_up(
    tmp_path: Path, until: int, seen: bool, ended: tuple[Kind, dict[str, object]], kind: OutcomeClass
) -> None:  # fmt: skip
    """The second death hits no rank. What the job had reached before the first one is not forgotten."""
    first = resumed(tmp_path / "first", 12, Trainer(kills=[(12, 0)]), [ENDED], until=30)
    first = first if seen else _without_saves(first)
    up_s = min(process.up_s for process in first.history.attempts[-1].ranks.values())
    later_s, folder = 4 * LATER_S, tmp_path / "second"
    folder.mkdir()
    synthetic_crash.write(folder, first, up_s - 0.5, {}, later_s)
    start = Event(Kind.JOB_STARTED, "harness", 0, 0, later_s, data={"submission": 0, "pid": 60})
    own = next_attempt(Trainer(kills=[(3 if until == 14 else 12, 0)]).record(), later_s, until, 2)
    own = own if seen else list(_without_saves(replace(first, events=tuple(own))).events)
    end = Event(ended[0], "harness", 1, 0, own[-1].mono_s + 1, data=ended[1])
    events = sorted((*read_events(folder), start, *own, end), key=lambda event: event.mono_s)
    again = synthetic_crash.without_missed_death(Record(synthetic_crash.with_death(first.plan), tuple(events), {}))
    ours, twins = truncate_all(again, [recorded()], 2)
    found = seen_in(ours, judged(ours, twins, first, ""), 30, ended[0] is Kind.STOPPED and ended is not ENOUGH)
    assert found.kind is kind, found.reason


def _without_saves(run: Record) -> Record:
    kept = (event for event in run.events if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END))
    return replace(run, events=tuple(kept))


def _with_inventory(run: Record) -> Any:
    return replace(run.plan, asserts=(*run.plan.asserts, Named("checkpoint_integrity", {})))


def test_when_a_state_means_death(tmp_path: Path) -> None:
    """In an order that was seen, the job dies just before the next operation. In another order, each rank dies before
    its own next operation, and the job after the last operation of any rank."""
    recording = saves(tmp_path, in_turn=False)
    runs = _runs(recording)
    for state in choice(recording).states:
        died_s, early = runs.death(state)
        if state.moments:
            assert (died_s, early) == (state.moments[-1][1], {})
            continue
        done = {rank: line[: (state.done or {})[rank]] for rank, line in recording.lines.items()}
        assert died_s == pytest.approx(max(line[-1].ended_s for line in done.values() if line))
        assert all(not line or line[-1].ended_s <= early.get(rank or 0, died_s) for rank, line in done.items())


def test_a_job_that_differs_from_run_to_run_is_refused() -> None:
    """An assertion that does not hold without any death can't judge a resume: it is named. Of equal runs all hold."""
    runs = ResumeRuns.__new__(ResumeRuns)
    runs.recorded, runs.plan, runs.twins = recorded(), recorded().plan, [recorded()]
    assert runs.doubt() == ""
    runs.twins = [recorded(Trainer(seed=8))]
    assert runs.doubt().startswith("loss_continuity: ")


def test_a_job_without_an_agent_is_refused() -> None:
    """A job whose command is not a launcher of ranks has no agent. Its steps are known from its log, but nothing would
    show that a resume got past the death: each state was called one from which the job does not start."""
    runs = ResumeRuns.__new__(ResumeRuns)
    runs.plan, runs.twins = recorded().plan, [recorded()]
    unseen = [event for event in recorded().events if event.kind is not Kind.AGENT_STARTED]
    runs.recorded = replace(recorded(), events=tuple(unseen))
    assert runs.doubt().startswith("no agent was loaded")


def _runs(recording: Recording) -> ResumeRuns:
    found = ResumeRuns.__new__(ResumeRuns)
    found.recording, found._ended_s = recording, recording.ended_s
    return found


def test_only_what_judges_results_is_asked() -> None:
    """How fast a resume is, and how it ends, is not judged; if nothing is left, that is bad usage."""
    run = recorded()
    more = (*run.plan.asserts, Named("completed", {}), Named("recovery_time", {}))
    assert assertions_for_resumes(replace(run.plan, asserts=more)) == run.plan.asserts
    with pytest.raises(UsageError, match="no assertion judges"):
        assertions_for_resumes(replace(run.plan, asserts=more[-2:]))


def test_states_are_put_below_the_runs_own_folder_only(tmp_path: Path) -> None:
    """A checkpoint folder of the user's is never touched."""
    plan, now = recorded().plan, RunDir(tmp_path)
    own = replace(plan, job=replace(plan.job, checkpoints="{run}/saved"))
    assert checkpoints_in(own, now) == tmp_path / "job" / "saved"
    for path in ("/job/checkpoints", "{run}", None):
        with pytest.raises(UsageError):
            checkpoints_in(replace(plan, job=replace(plan.job, checkpoints=path)), now)
