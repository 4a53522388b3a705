"""A resume as the next attempt of the recorded run: the past up to the death, the cut, and the class of the outcome."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from packing import pack
from resumes import ENDED, ENOUGH, FAILED, LATER_S, Trainer, after_step, recorded, resumed

from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.crash_explorer import operations, synthetic_crash
from torchaos.harness.crash_explorer.operations import Operation
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, OutcomeClass, seen_in
from torchaos.harness.crash_explorer.resume_runs import Patience, StopRule
from torchaos.harness.crash_explorer.resumers import ResumeTrace, difference
from torchaos.harness.crash_explorer.synthetic_crash import truncate, truncate_all
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir

GOLDEN = Path(__file__).parents[1] / "data" / "runs" / "kill"


def _class_of(run: Record, hung: bool = False) -> Outcome:
    twin = recorded()
    run, twins = truncate_all(run, [twin], 2)
    seen = seen_in(run, verdict_of(run, twins, ""), 30, hung)
    return Outcome(
        "state", "digest", "process death", 0, seen.kind, seen.reason, seen.assertion, seen.lost_steps,
        seen.from_step, seen.mended,
    )  # fmt: skip


def test_the_past_ends_with_the_death_of_all_ranks(tmp_path: Path) -> None:
    """The events up to the death are there, moved to just before the resume; then all ranks are killed, and the job."""
    run = recorded()
    synthetic_crash.write(tmp_path, run, after_step(run, 12), {}, LATER_S)
    damaged: list[str] = []
    found = Record(synthetic_crash.with_death(run.plan), tuple(read_events(tmp_path, damaged)), {})
    assert not damaged
    assert found.history.highest_step() == 12
    assert [attempt.exit_codes for attempt in found.history.attempts] == [{0: -9, 1: -9}]
    assert [(hit.fault, hit.ranks) for hit in landings(found)] == [(synthetic_crash.DEATH, frozenset({0, 1}))]
    assert found.exit_code == -9
    assert LATER_S - 0.1 < found.events[-1].mono_s < LATER_S


def test_a_rank_may_die_earlier_than_the_others(tmp_path: Path) -> None:
    """In an order of the ranks that was not seen, a rank has only the events before its own last operation."""
    run = recorded()
    synthetic_crash.write(tmp_path, run, after_step(run, 12), {1: after_step(run, 11)}, LATER_S)
    found = Record(run.plan, tuple(read_events(tmp_path)), {})
    steps = {(one.rank, one.global_step) for one in found.history.executions}
    assert (0, 12) in steps
    assert (1, 12) not in steps
    assert (1, 11) in steps


def test_resumed_rightly(tmp_path: Path) -> None:
    """A job that died after step 12 and goes on from the checkpoint of step 10 as the twin does is right, although it
    was ended before its last step."""
    found = _class_of(resumed(tmp_path, 12, Trainer(kills=[(13, 0)]), [ENOUGH]))
    assert (found.kind, found.from_step) == (OutcomeClass.RIGHT, 10), found.reason


def test_lost_work(tmp_path: Path) -> None:
    """A job that goes on from step 5, although the checkpoint of step 10 was complete, lost 5 steps."""
    found = _class_of(resumed(tmp_path, 12, Trainer(kills=[(8, 0)]), [ENOUGH]))
    assert (found.kind, found.assertion, found.lost_steps) == (OutcomeClass.LOST_WORK, "no_lost_work", 5), found.reason


@pytest.mark.parametrize(
    ("goes_on", "kind", "from_step"),
    [(18, OutcomeClass.RIGHT, 15), (13, OutcomeClass.LOST_WORK, 10), (8, OutcomeClass.LOST_WORK, 5)],
)
def test_a_second_death(tmp_path: Path, goes_on: int, kind: OutcomeClass, from_step: int) -> None:
    """The job died after step 12, went on from step 10, and died again after step 17: the newest checkpoint is then the
    one of step 15, which the first resume saved. Both deaths are in the plan and in the history."""
    first = resumed(tmp_path / "first", 12, Trainer(kills=[(13, 0)]), [ENDED], until=30)
    again = Trainer(kills=[(goes_on, 0)])
    second = resumed(tmp_path / "second", 17, again, [ENOUGH], until=25, run=first)
    assert [attempt.exit_codes for attempt in second.history.attempts[:2]] == [{0: -9, 1: -9}] * 2
    assert [attempt.base for attempt in second.history.attempts] == [0, 10, from_step]
    assert [fault.id for fault in second.plan.faults] == [f"{synthetic_crash.DEATH}-before", synthetic_crash.DEATH]
    found = _class_of(second)
    assert (found.kind, found.from_step) == (kind, from_step), found.reason


def test_silently_wrong(tmp_path: Path) -> None:
    """A job that does not restore its sampler goes on with other samples: the assertion that says so is named."""
    wrong = Trainer(kills=[(13, 0)], broken=frozenset({"sampler"}))
    found = _class_of(resumed(tmp_path, 12, wrong, [ENOUGH]))
    assert (found.kind, found.assertion) == (OutcomeClass.WRONG, "sample_accounting")


def test_it_trained_and_nobody_knows_which_steps(tmp_path: Path) -> None:
    """A job went on to its end, and no load, counter, sample or loss shows from which step. It did start, so the
    outcome is not known."""
    unseen = Trainer(
        kills=[(13, 0)], loads_seen=False, counters_seen=False, samples_seen=False, broken=frozenset({"rng"})
    )
    found = _class_of(resumed(tmp_path, 12, unseen, [ENDED]))
    assert found.kind is OutcomeClass.UNCLEAR, found.reason
    assert "it is not known which steps it made" in found.reason


def test_nothing_was_left_to_train(tmp_path: Path) -> None:
    """A job that died after its last step, and then ends at once with exit code 0, is right."""
    run = recorded()
    synthetic_crash.write(tmp_path, run, after_step(run, 30), {}, LATER_S)
    start = Event(Kind.JOB_STARTED, "harness", 0, 0, LATER_S, data={"submission": 0, "pid": 60})
    end = Event(Kind.JOB_EXITED, "harness", 1, 0, LATER_S + 1, data=ENDED[1])
    found = _class_of(Record(synthetic_crash.with_death(run.plan), (*read_events(tmp_path), start, end), {}))
    assert found.kind is OutcomeClass.RIGHT, found.reason


@pytest.mark.parametrize("second", [True, False])
def test_it_does_not_start(tmp_path: Path, second: bool) -> None:
    """A start that ends with an error is told with the job's own error; a second start may get past the death."""
    run = resumed(tmp_path, 12, Trainer(kills=[(13, 0)]), [ENOUGH])
    begun = [event for event in run.events if event.mono_s < LATER_S]
    first = [Event(Kind.JOB_STARTED, "harness", 0, 0, LATER_S - 0.003, data={"submission": 0, "pid": 60})]
    first += [Event(Kind.JOB_EXITED, "harness", 1, 0, LATER_S - 0.002, data=FAILED[1])]
    rest = [event for event in run.events if event.mono_s >= LATER_S]
    if not second:
        again = {**FAILED[1], "submission": 1}
        rest = [rest[0], Event(Kind.JOB_EXITED, "harness", 9, 0, LATER_S + 1, data=again)]
    rest[0] = replace(rest[0], data={"submission": 1, "pid": 61})
    job = replace(run.plan.job, resubmit_times=1)
    log = () if second else ("Traceback (most recent call last):", "RuntimeError: the file is cut short")
    run = Record(replace(run.plan, job=job), (*begun, *first, *rest), {}, log_end=log)
    found = _class_of(run)
    assert (found.kind, found.mended) == (OutcomeClass.WONT_START, second)
    assert "exit code 1" in found.reason
    assert second or found.reason.endswith("RuntimeError: the file is cut short")


def test_it_hangs(tmp_path: Path) -> None:
    """A resume that was ended because nothing was seen of it hangs."""
    run = recorded()
    synthetic_crash.write(tmp_path, run, after_step(run, 12), {}, LATER_S)
    start = Event(Kind.JOB_STARTED, "harness", 0, 0, LATER_S, data={"submission": 0, "pid": 60})
    text = {"reason": "nothing was seen of its ranks for 60 s", "interrupted": False}
    stop = Event(Kind.STOPPED, "harness", 1, 0, LATER_S + 60, data=text)
    found = _class_of(
        Record(synthetic_crash.with_death(run.plan), (*read_events(tmp_path), start, stop), {}), hung=True
    )
    assert (found.kind, found.reason) == (OutcomeClass.HANGS, text["reason"])


def test_it_hangs_beyond_the_death(tmp_path: Path) -> None:
    """A resume that got past the death, and then hangs before it has shown enough, hangs. It is not silently wrong,
    although it never does the later steps of its twin."""
    stop = {"reason": "nothing was seen of its ranks for 60 s", "interrupted": False}
    run = resumed(tmp_path / "events", 12, Trainer(kills=[(13, 0)]), [(Kind.STOPPED, stop)], until=14)
    found = _class_of(run, hung=True)
    assert (found.kind, found.reason, found.from_step) == (OutcomeClass.HANGS, stop["reason"], 10)


def test_a_job_that_ends_well_without_a_new_step_has_not_come_back(tmp_path: Path) -> None:
    """Exit code 0 is no resume: 18 steps were still to be made."""
    run = recorded()
    synthetic_crash.write(tmp_path, run, after_step(run, 12), {}, LATER_S)
    start = Event(Kind.JOB_STARTED, "harness", 0, 0, LATER_S, data={"submission": 0, "pid": 60})
    end = Event(Kind.JOB_EXITED, "harness", 1, 0, LATER_S + 1, data=ENDED[1])
    found = _class_of(Record(synthetic_crash.with_death(run.plan), (*read_events(tmp_path), start, end), {}))
    assert found.kind is OutcomeClass.WONT_START


def test_what_comes_after_the_last_common_step_is_not_judged(tmp_path: Path) -> None:
    """Rank 0 was one step ahead and in a save when the resume was ended: both are cut off, and the twin likewise."""
    run = resumed(tmp_path, 12, Trainer(kills=[(13, 0)]), [ENOUGH], until=21)
    late = [event for event in run.events if event.kind is Kind.STEP and event.attempt == 1 and event.step == 11]
    ahead = tuple(event for event in run.events if event is not next(one for one in late if one.rank == 1))
    cut = truncate(ahead, 2)
    assert cut is not None
    assert cut.local_step == 10
    ours, (twin,) = truncate_all(replace(run, events=ahead), [recorded()], 2)
    assert ours.history.last_step == twin.history.last_step == 20
    assert {save.global_step for save in ours.history.saves} == {save.global_step for save in twin.history.saves}
    assert {save.global_step for save in ours.history.saves} == {5, 10, 15}
    assert verdict_of(ours, [twin], "").verdict is Verdict.PASSED


def test_forked_ranks_must_do_the_same(tmp_path: Path) -> None:
    """A resume equals itself, also if it was ended earlier; one that restores less, or loads nothing, differs."""
    runs = [
        resumed(tmp_path / str(number), 12, trainer, [], until=until)
        for number, (trainer, until) in enumerate([
            (Trainer(kills=[(13, 0)]), 20), (Trainer(kills=[(13, 0)]), 15),
            (Trainer(kills=[(13, 0)], broken=frozenset({"rng"})), 20),
            (Trainer(kills=[(13, 0)], loads_seen=False), 20),
        ])
    ]  # fmt: skip
    cold, *others = map(ResumeTrace.of, runs)
    assert [difference(cold, warm) for warm in (cold, others[0])] == ["", ""]
    assert difference(cold, others[1]) == "in step 11 of rank 0, a warm resume has other losses than a cold one"
    assert "loads" in difference(cold, others[2])


def test_a_cold_resume_is_compared_after_its_files_are_gone(tmp_path: Path) -> None:
    """The run directory of the cold resume is used again for the warm one before the two are compared."""
    copy = tmp_path / "run"
    shutil.copytree(GOLDEN, copy)
    assert sum(map(pack, copy.glob("events/*.jsonl")))
    cold = ResumeTrace.of(Record.load(RunDir(copy)))
    shutil.rmtree(copy)
    assert cold.steps
    assert difference(cold, ResumeTrace.of(Record.load(RunDir(GOLDEN)))) == ""


def test_the_goal_counts_global_steps(tmp_path: Path) -> None:
    """After a resume from step 10, a death at step 12 is passed by 3 steps in the fifth step, and not while a rank
    saves."""
    run = resumed(tmp_path, 12, Trainer(kills=[(13, 0)]), [], until=29)
    goal, reached = StopRule(12, 3, 2), []
    for number in range(1, len(run.events) + 1):
        if goal.is_reached(run.events[:number]):
            reached.append(run.events[number - 1])
    assert (reached[0].kind, reached[0].step, reached[0].attempt) == (Kind.STEP, 5, 1)
    saves = [event.mono_s for event in run.events if event.kind is Kind.SAVE_BEGIN and event.attempt == 1]
    ends = [event.mono_s for event in run.events if event.kind is Kind.SAVE_END and event.attempt == 1]
    assert not any(saves[0] <= event.mono_s < ends[1] for event in reached)


def test_patience_begins_anew_with_each_sign_of_life() -> None:
    """Sixty seconds without a sign of a rank are too long; a step begins them anew, and so does a second start; a line
    of the log does not."""
    step, line, start = (Event(kind, "", 0, 0.0, 0.0) for kind in (Kind.STEP, Kind.LOG_STEP, Kind.JOB_STARTED))
    patience = Patience(60.0, 0.0)
    assert not patience.is_over([], 59.0)
    assert not patience.is_over([step], 59.5)
    assert not patience.is_over([step, line], 119.0)
    assert patience.is_over([step, line], 120.0)
    assert not patience.is_over([step, line, start], 121.0)
    assert not patience.is_over([step, line, start], 180.0)


def test_a_save_with_which_the_job_had_not_finished_was_no_checkpoint(tmp_path: Path) -> None:
    """A rank that writes a file and then its marker, and dies between the two, may go on from an older checkpoint: the
    recorded run shows that the save was not over. Once the next step is made, it was."""
    run = recorded()
    saved_s = max(save.ended_s or 0.0 for save in run.history.saves if save.global_step == 10)
    marker = Operation(
        0, operations.OperationKind.CREATE, "marker", 0, begun_s=saved_s + 0.004, ended_s=saved_s + 0.005
    )
    later = Operation(1, operations.OperationKind.CREATE, "next", 0, begun_s=saved_s + 100.0, ended_s=saved_s + 101.0)
    for died_s in (saved_s + 0.004, marker.ended_s):  # before the marker's operation has ended, it is not done
        assert len(synthetic_crash.unfinished(run, died_s, {0: (marker, later)})) == 1  # of rank 0
    assert not synthetic_crash.unfinished(run, saved_s + 0.006, {0: (marker, later)})


@pytest.mark.parametrize(("held", "over"), [(("weight", "moment"), True), (("weight",), False)])
def test_a_save_of_another_checkpoint_is_nothing_that_was_missing(held: tuple[str, ...], over: bool) -> None:
    """After `step-10`, a rank saves `last`, and dies in it. If `last` holds what `step-10` holds, the job can resume
    from either, so the save of `step-10` was over. If it holds less, `step-10` may need it."""
    run = recorded()
    end = max((one for one in run.events if one.kind is Kind.SAVE_END and one.step == 10), key=lambda one: one.mono_s)
    name = str(end.data["path"]).rpartition("/")[2]
    more = [
        replace(end, kind=kind, seq=10_000 + number, mono_s=end.mono_s + at_s,
                data={**end.data, "path": "/job/checkpoints/last"})
        for number, (kind, at_s) in enumerate([(Kind.SAVE_BEGIN, 0.001), (Kind.SAVE_END, 0.004)])
    ]  # fmt: skip
    whole = {"format": "torch", "step": 10, "complete": True, "loadable": True, "problem": None, "values": {}}
    checkpoints = [
        {"path": path, **whole, "tensors": dict.fromkeys(names, "d")}
        for path, names in ((name, ("weight", "moment")), ("last", held))
    ]
    inventory = {"root": "/job/checkpoints", "checkpoints": checkpoints}
    events = tuple(sorted((*run.events, *more), key=lambda event: event.mono_s))
    run = replace(run, events=events, artifacts={"inventory": inventory})
    write = Operation(
        0, operations.OperationKind.CREATE, "last", end.rank, begun_s=end.mono_s + 0.002, ended_s=end.mono_s + 0.003
    )
    found = synthetic_crash.unfinished(run, end.mono_s + 0.003, {end.rank: (write,)})
    assert ((end.source, end.seq, end.kind) not in found) is over


def test_a_rank_that_died_earlier_had_not_finished_its_save() -> None:
    """Rank 1 had written its file, was to rename it, and died. The job died later, when that time was over."""
    run = recorded()
    end = next(one for one in run.events if one.kind is Kind.SAVE_END and one.rank == 1)
    rename = Operation(
        0, operations.OperationKind.RENAME, "part", 1, begun_s=end.mono_s + 0.001, ended_s=end.mono_s + 0.002
    )
    lines: dict[int | None, Sequence[Operation]] = {1: (rename,)}
    assert not synthetic_crash.unfinished(run, end.mono_s + 0.05, lines)
    assert synthetic_crash.unfinished(run, end.mono_s + 0.05, lines, {1: rename.begun_s}) == {
        (end.source, end.seq, end.kind)
    }


def test_a_file_that_was_to_be_renamed_was_no_checkpoint(tmp_path: Path) -> None:
    """A save under another name that is renamed only after the death had not become a checkpoint, also if training had
    gone on meanwhile; one that was renamed before had."""
    run = recorded()
    end = next(event for event in run.events if event.kind is Kind.SAVE_END)
    moved = {"path": end.data["path"], "to": "/job/checkpoints/final"}
    renamed = replace(end, kind=Kind.RENAMED, seq=10_000, mono_s=end.mono_s + 0.5, data=moved)
    run = replace(run, events=tuple(sorted((*run.events, renamed), key=lambda event: event.mono_s)))
    assert (end.source, end.seq, end.kind) in synthetic_crash.unfinished(run, end.mono_s + 0.4, {})
    assert (end.source, end.seq, end.kind) not in synthetic_crash.unfinished(run, end.mono_s + 0.6, {})
