"""The load that counts, and the global step at which training continues: after a warm-up, within a process, from files
of other runs, and if witnesses disagree."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchaos.assertions.checkpoint_integrity import CheckpointIntegrity
from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.harness.analysis.checkpointing.resumed_from import resumes
from torchaos.harness.analysis.missing_data import why_unplaced
from torchaos.harness.analysis.recovery_times import recoveries
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.record.history import Attempt, Execution, History, Load, base_of, saved_as
from torchaos.harness.record.history.attempts import Segment, may_begin
from torchaos.harness.record.history.step_evidence import (
    LOG,
    MOMENTS,
    OPTIMIZER,
    STATE,
    STRAIGHT,
    Witness,
    decide,
)
from torchaos.harness.record.record import Record

_SAVES = (Kind.SAVE_BEGIN, Kind.SAVE_END)


def _trainer() -> Any:
    path = Path(__file__).parents[1] / "assertions" / "builder.py"
    spec = importlib.util.spec_from_file_location("torchaos_test_builder_of_placing", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Trainer


Trainer = _trainer()


def _with(event: Event, **data: Any) -> Event:
    return replace(event, data={**event.data, **data})


def _load(path: str, before: Event, after: int, rank: int, told: int | None = None) -> Event:
    """A load that ended a moment before an event, `after` so many steps. `told`: the step in its contents."""
    data = {"path": path, "format": "torch", "ok": True, "numbers": {} if told is None else {"step": told}}
    return replace(before, kind=Kind.LOAD_END, mono_s=before.mono_s - 0.002, rank=rank, step=after, data=data)


def test_between_two_steps_a_segment_begins_if_a_counter_jumps() -> None:
    """Counters that go on by one, the scheduler's where there is one, say that nothing was loaded that counts. One that
    does not says that something was, whatever its name; without counters, a number has to tell."""

    def steps(opt: int | None, sched: int | None = None) -> dict[int, Execution]:
        return {0: Execution(0, 0, 7, 0.0, opt_step=opt, sched_step=sched)}

    named = Load("/x/step-5.pt", 0, 0, 0.0, True)
    plain = replace(named, path="/x/weights.pt")
    assert not may_begin([named], steps(7), steps(8))
    assert not may_begin([named], steps(7, 3), steps(8, 4))
    assert may_begin([plain], steps(7, 3), steps(8, 9))
    assert may_begin([plain], steps(7), steps(6))
    assert may_begin([named], steps(None), steps(None))
    assert not may_begin([plain], steps(None), steps(None))


def test_losses_alone_can_tell_where_an_attempt_goes_on() -> None:
    """With no load, counter or sample seen, the losses of its first steps are those of steps that were done before."""
    unseen = {"loads_seen": False, "counters_seen": False, "samples_seen": False}
    assert _attempt(Trainer(kills=[(18, 1)], **unseen).record().events).base == 15


def _told(history: History) -> dict[tuple[int, int], Any]:
    return {key: (one.losses, one.samples, one.lr) for key, one in history.counting().items()}


def _attempt(events: Iterable[Event], number: int = 1, twin: History | None = None) -> Attempt:
    found = History.of(list(events), twin).attempt(number)
    assert found is not None
    return found


def _warmed_up(events: Iterable[Event], by: int = 3) -> list[Event]:
    """Each attempt makes its first steps as the first one does, puts the state back, and loads what it loads."""
    events = list(events)
    warm = [event for event in events if event.kind is Kind.STEP and event.attempt == 0 and (event.step or 0) <= by]
    found = []
    for event in events:
        if event.kind is Kind.AGENT_STARTED:
            own = [step for step in warm if step.rank == event.rank]
            found += [
                replace(step, attempt=event.attempt, mono_s=event.mono_s + 0.001 * n) for n, step in enumerate(own)
            ]
        counted = event.kind in (Kind.STEP, Kind.LOAD_END, *_SAVES)
        found.append(replace(event, step=(event.step or 0) + by) if counted else event)
    return found


@pytest.mark.parametrize("counters", [True, False])
def test_steps_before_a_return_to_the_start_only_warm_up(counters: bool) -> None:
    """Steps before the load of a restarted job are no part of its history, and neither are steps of the first attempt
    after which its counters or its samples, and its losses, begin again."""
    trainer = {"counters_seen": counters}
    twin = History.of(_warmed_up(Trainer(**trainer).record().events))
    history = History.of(_warmed_up(Trainer(kills=[(18, 1)], **trainer).record().events), twin)
    attempt = history.attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.first_step, attempt.conflicts, history.unplaced) == (15, 16, (), ())
    assert _told(history) == _told(twin)
    assert (history.last_step, attempt.loaded) == (30, "/job/checkpoints/step-15")


def test_steps_after_the_load_of_each_attempt_only_warm_up() -> None:
    """Each attempt makes three steps after it has loaded its state, if there is any, and then puts it back. No fault
    had hit it, and that is no part of the program with which the steps would count on."""

    def warmed_up(events: Iterable[Event]) -> list[Event]:
        events = list(events)
        loads = [(event.attempt, event.rank) for event in events if event.kind is Kind.LOAD_END]
        found, left = list[Event](), {(0, 0), (0, 1), *loads}
        for event in events:
            who = event.attempt, event.rank
            counted = event.kind in (Kind.STEP, *_SAVES)
            found.append(replace(event, step=(event.step or 0) + 3) if counted else event)
            begins = event.kind is Kind.LOAD_END if who in loads else event.kind is Kind.AGENT_STARTED
            if begins and who in left:
                left -= {who}
                own = [one for one in events if one.kind is Kind.STEP and (one.attempt, one.rank) == who]
                found += [replace(one, mono_s=event.mono_s + 1e-4 * n) for n, one in enumerate(own[:3], 1)]
        return sorted(found, key=lambda event: event.mono_s)

    twin = History.of(warmed_up(Trainer().record().events))
    history = History.of(warmed_up(Trainer(kills=[(18, 1)]).record().events), twin)
    assert [(part.number, part.after, part.base) for part in history.segments] == [(0, 3, 0), (1, 0, 15), (1, 3, 15)]
    assert _told(history) == _told(twin)


def test_a_job_that_warms_up_is_told_its_step() -> None:
    """What the harness adds to the agent's own count leaves the steps of the warm-up out."""
    events = _warmed_up(Trainer(kills=[(18, 1)]).record().events)
    last = max(
        n for n, event in enumerate(events) if event.kind is Kind.STEP and event.step == 5 and event.attempt == 1
    )
    assert base_of(events[: last + 1], 1)[0] == 15 - 3


def _rolled_back(events: Iterable[Event], at: int = 12, to: int = 10) -> list[Event]:
    """A fault hits after step `at`, and all ranks load the checkpoint of step `to` in the same process and go on from
    it."""
    found: list[Event] = []
    again = [event for event in events if event.step is not None and event.step > to and event.kind is Kind.STEP]
    for event in events:
        if event.kind is Kind.STEP and event.step == at + 1:
            break
        found.append(event)
    begun = found[-1].mono_s + 0.01
    then = replace(found[-1], mono_s=begun)
    hit = {"fault": "nan", "phase": None, "global_step": at, "pid": None}
    found.append(replace(then, kind=Kind.APPLIED, mono_s=begun - 0.005, data=hit))
    found += [_load(f"/job/checkpoints/step-{to}", then, at, rank, to) for rank in (0, 1)]
    found += [
        replace(event, step=(event.step or 0) + at - to, mono_s=begun + 0.01 * n) for n, event in enumerate(again, 1)
    ]
    return found


@pytest.mark.parametrize("counters", [True, False])
def test_a_rollback_within_the_process_is_a_segment(counters: bool) -> None:
    """Steps that all ranks put back by a load are made again in the same attempt, and the second time counts."""
    straight = Trainer(counters_seen=counters).record()
    events = _rolled_back(straight.events)
    history = History.of(events, straight.history)
    assert [(part.number, part.after, part.base) for part in history.segments] == [(0, 0, 0), (0, 12, 10)]
    assert _told(history) == _told(straight.history)
    assert [(new.global_step, new.rank) for _old, new in history.redone()] == [(11, 0), (11, 1), (12, 0), (12, 1)]
    load = next(event for event in events if event.kind is Kind.LOAD_END)
    assert history.steps_done(0, 0, load.mono_s - 0.005) == 12
    assert history.steps_done(0, 0, load.mono_s) == 10
    assert all(one.base == 0 and not one.conflicts for one in history.attempts)


def test_a_program_that_begins_its_next_part_with_an_older_state_counts_on() -> None:
    """No fault hit it: the next trial, fold or phase loads a file of an earlier step, and no step falls out of the
    history, in the run and in its twin."""
    events = [event for event in _rolled_back(Trainer().record().events) if event.kind is not Kind.APPLIED]
    history = History.of(events)
    assert [(part.number, part.after, part.base) for part in history.segments] == [(0, 0, 0)]
    made = {event.step for event in events if event.kind is Kind.STEP}
    assert len(history.by_step()) == len(made) > len(Trainer().record().history.by_step())
    assert [part.base for part in History.of(events, history).segments] == [0]


def _paused(events: Iterable[Event], at_step: int) -> list[Event]:
    """The events with a fault that only paused rank 1 after this step."""
    found = list(events)
    done = next(event for event in found if event.kind is Kind.STEP and (event.rank, event.step) == (1, at_step))
    hit = {"fault": "pause", "phase": None, "global_step": at_step, "pid": None}
    return sorted([*found, replace(done, kind=Kind.APPLIED, mono_s=done.mono_s + 1e-4, data=hit)],
                  key=lambda event: event.mono_s)  # fmt: skip


def test_a_return_that_the_twin_makes_too_is_one_of_the_program() -> None:
    """Whatever hit the run before: its losses and samples are compared with those of the twin's same steps."""
    own = [event for event in _rolled_back(Trainer().record().events) if event.kind is not Kind.APPLIED]
    plan = Trainer().record().plan
    twin, run = Record(plan, tuple(own), {}), Record(plan, tuple(_paused(own, 4)), {})
    assert twin.history.program_returns == {12}
    assert [part.base for part in run.history.segments] == [0, 10]
    assert [part.base for part in run.beside([twin]).history.segments] == [0]
    for assertion in (LossContinuity(), SampleAccounting()):
        found = assertion.judge(run.beside([twin]), [twin])
        assert found.outcome is Outcome.PASSED, found.reason


def test_a_fault_that_hit_another_replica_may_be_why_a_replica_goes_back() -> None:
    """Its own record has nothing of that fault but the time."""
    events = [event for event in _rolled_back(Trainer().record().events) if event.kind is not Kind.APPLIED]
    load_s = next(event.mono_s for event in events if event.kind is Kind.LOAD_END)
    parts = [History.of(events, hit_elsewhere_s=times).segments for times in ((), (load_s - 0.01,), (load_s + 99.0,))]
    assert [len(each) for each in parts] == [1, 2, 1]


def test_a_rollback_to_a_state_in_memory_is_a_segment() -> None:
    """No file is loaded: the optimizer's counter goes back on all ranks, and the same samples are trained on again. If
    one rank's counter goes on, or the samples do, nothing was put back: an optimizer that is made anew counts from
    1."""
    straight = Trainer().record()
    events = [event for event in _rolled_back(straight.events) if event.kind is not Kind.LOAD_END]
    history = History.of(events, straight.history)
    assert [(part.after, part.base, part.in_memory) for part in history.segments] == [(0, 0, False), (12, 10, True)]
    assert _told(history) == _told(straight.history)
    last = max(e.mono_s for e in events if e.kind is Kind.STEP and e.step == 12)
    assert history.segments[1].started_s == last
    again = min(e.mono_s for e in events if e.kind is Kind.STEP and e.step == 13 and e.rank == 0)
    assert history.steps_done(0, 0, (last + again) / 2) == 12  # such as the fault that made the job go back
    assert history.steps_done(0, 0, again) == 11
    assert not resumes(Record(straight.plan, tuple(events), {}))  # no checkpoint was to choose
    alone = [
        _with(e, opt_step=e.step) if e.kind is Kind.STEP and e.rank == 1 and (e.step or 0) > 12 else e for e in events
    ]
    assert len(History.of(alone, straight.history).segments) == 1
    anew = [
        _with(e, opt_step=(e.step or 0) - 12) if e.kind is Kind.STEP and (e.step or 0) > 12 else e
        for e in straight.events
    ]
    history = History.of(anew, straight.history)
    assert len(history.segments) == 1
    assert history.last_step == straight.history.last_step


def test_a_rollback_by_one_step_is_a_segment() -> None:
    """The optimizer's counter stands still on all ranks, and the samples are those of the step before. A step that a
    GradScaler skipped, or one after which the job trains on with other samples, was not put back."""
    straight = Trainer().record()
    events = [event for event in _rolled_back(straight.events, 12, 11) if event.kind is not Kind.LOAD_END]
    history = History.of(events, straight.history)
    assert [(part.after, part.base, part.in_memory) for part in history.segments] == [(0, 0, False), (12, 11, True)]
    assert _told(history) == _told(straight.history)
    assert [new.global_step for _old, new in history.redone()] == [12, 12]
    skipped = [_with(e, skipped=True) if e.kind is Kind.STEP and e.step == 13 else e for e in events]
    assert len(History.of(skipped, straight.history).segments) == 1
    still = [
        _with(e, opt_step=(e.step or 0) - 1) if e.kind is Kind.STEP and (e.step or 0) > 12 else e
        for e in straight.events
    ]
    assert len(History.of(still, straight.history).segments) == 1


@pytest.mark.parametrize("counters", [True, False])
def test_a_load_for_an_evaluation_puts_nothing_back(counters: bool) -> None:
    """A checkpoint is loaded between two steps, and counters and samples go on as if nothing had been."""
    straight = Trainer(counters_seen=counters).record()
    at = next(event for event in straight.events if event.kind is Kind.STEP and event.step == 13)
    loads = [_load("/job/checkpoints/step-10", at, 12, rank, 10) for rank in (0, 1)]
    history = History.of([*straight.events, *loads], straight.history)
    assert [part.base for part in history.segments] == [0]
    assert _told(history) == _told(straight.history)


def test_files_of_data_put_nothing_back() -> None:
    """A file read between any two steps, without counters of the job or a number in its name, is no checkpoint."""
    straight = Trainer(counters_seen=False).record()
    steps = [event for event in straight.events if event.kind is Kind.STEP]
    loads = [_load(f"/data/shard-{event.step}.pt", event, (event.step or 1) - 1, event.rank or 0) for event in steps]
    history = History.of([*straight.events, *loads])
    assert [part.base for part in history.segments] == [0]
    assert _told(history) == _told(straight.history)


def _began_with(events: Sequence[Event], path: str, told: int) -> list[Event]:
    """Each process loads that file, before what else it loads."""
    started = [event for event in events if event.kind is Kind.AGENT_STARTED]
    early = [replace(event, mono_s=event.mono_s + 0.003) for event in started]
    return [*events, *(_load(path, at, 0, at.rank or 0, told) for at in early)]


@pytest.mark.parametrize("seen", [{}, {"counters_seen": False}, {"counters_seen": False, "samples_seen": False}])
@pytest.mark.parametrize("kill", [3, 18])
def test_fine_tuning_begins_at_step_0(seen: dict[str, bool], kill: int) -> None:
    """The number in another run's file says nothing of this one, killed before its first checkpoint or after."""
    events = _began_with(Trainer(kills=[(kill, 1)], **seen).record().events, "/else/step-5000.pt", 5000)
    history = History.of(events)
    assert [one.base for one in history.attempts] == [0, 15 if kill == 18 else 0]
    assert [one.conflicts for one in history.attempts] == [(), ()]


def test_a_run_that_goes_on_from_an_older_one_keeps_its_count() -> None:
    """The file's number is this run's where the restored optimizer counts from it."""
    events = [
        _with(event, opt_step=event.data["opt_step"] + 5000) if event.kind is Kind.STEP else event
        for event in Trainer(kills=[(18, 1)]).record().events
    ]
    events = [
        replace(event, data={**event.data, "path": event.data["path"].replace("step-", "step-50")})
        if event.kind in (*_SAVES, Kind.LOAD_END) and len(event.data["path"]) == len("/job/checkpoints/step-15")
        else event
        for event in events
        if "step-5" not in str(event.data.get("path"))
    ]
    history = History.of(_began_with(events, "/else/step-5000.pt", 5000))
    assert [one.base for one in history.attempts] == [5000, 5015]


def _ahead(events: Sequence[Event], restored: bool) -> list[Event]:
    """As with a framework that begins each process with a step of the optimizer that trains nothing. `restored`: later
    attempts load the counter, which is ahead too; else they begin with a new one."""
    first: dict[tuple[int, int], Event] = {}
    for event in events:
        if event.kind is Kind.STEP:
            first.setdefault((event.attempt or 0, event.rank or 0), event)
    told = [
        replace(event, kind=Kind.AHEAD, mono_s=event.mono_s - 0.001, data={"steps": 1})
        for (attempt, _rank), event in first.items()
        if not (attempt and restored)
    ]
    counted = [
        _with(event, opt_step=1 + (event.data["opt_step"] if restored or not event.attempt else event.step or 0))
        if event.kind is Kind.STEP
        else event
        for event in events
    ]
    return [*counted, *told]


@pytest.mark.parametrize(("kill", "restored"), [(1, False), (3, False), (18, False), (18, True)])
def test_a_counter_that_was_ahead_from_the_start_shows_no_earlier_steps(kill: int, restored: bool) -> None:
    """The first attempt begins at step 0, though the counter stands at 2 after its first step. A resume is placed by
    the counter as it was seen, also without a checkpoint; a counter that was not restored speaks against the file."""
    trainer = Trainer(kills=[(kill, 1)], samples_seen=False, losses_seen=False)
    events = _ahead(trainer.record().events, restored)
    history = History.of(events)
    assert [one.base for one in history.attempts] == [0, 15 if kill == 18 else 0]
    lost = kill == 18 and not restored
    assert [len(one.conflicts) for one in history.attempts] == [0, int(lost)]
    if lost:
        assert history.attempts[1].conflicts[0].startswith("by the optimizer's own step counter on ranks 0, 1, 0 steps")


def test_a_run_that_goes_on_from_an_older_one_is_not_taken_for_a_new_run() -> None:
    """A counter that is far from the start, with nothing said about it, still shows how many steps were done before."""
    events = [
        _with(event, opt_step=event.data["opt_step"] + 1) if event.kind is Kind.STEP else event
        for event in Trainer(samples_seen=False).record().events
    ]
    assert [one.base for one in History.of(events).attempts] == [1]


def _as_written_by_a_thread(event: Event, behind: int) -> Event:
    if event.kind not in _SAVES:
        return event
    late = replace(event, step=(event.step or 0) + behind, mono_s=event.mono_s + 0.022 * behind)
    return _with(late, blocked_s=0.0)


@pytest.mark.parametrize("name", ["step-{}", "ckpt.pt"])
def test_a_save_in_a_thread_is_of_the_state_that_it_holds(name: str) -> None:
    """A writer that begins two steps late does not make a checkpoint newer: its name tells, or what follows a load."""
    events = [_as_written_by_a_thread(event, 2) for event in Trainer(kills=[(18, 1)]).record().events]
    if name == "ckpt.pt":
        events = [_with(event, path=f"/job/{name}") if "path" in event.data else event for event in events]
    history = History.of(events)
    attempt = history.attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.conflicts) == (15, ())
    assert saved_as(str(attempt.loaded), history.saves, attempt.started_s).global_step == 15  # type: ignore[union-attr]


def test_a_lone_record_of_a_save_does_not_outvote_all_others() -> None:
    """The file tells of another step, and what the job does bears it out: the state is that of the file."""
    record, file = (
        Witness("the loaded checkpoint", (13,), ""),
        Witness("the contents of the loaded checkpoint", (5, 6), "", prefers_first=True),
    )
    counter, samples = Witness("the optimizer's own step counter", (5,), ""), Witness("the samples", (5, 13), "")
    base, conflicts = decide([record, file, counter, samples])
    assert (base, len(conflicts)) == (5, 1)
    assert conflicts[0].startswith("by the loaded checkpoint, 13")
    assert decide([record, file, samples])[0] is None
    assert decide([record, file, replace(counter, fits=(13,)), samples])[0] == 13
    assert decide([record, counter, replace(samples, fits=(5,))])[0] is None, "what the job does may be a bug"


@pytest.mark.parametrize("broken", ["optimizer", "schedule", "sampler"])
def test_a_restore_bug_is_still_told_after_a_rollback(broken: str) -> None:
    """What was not put back by the load within the process speaks against the others."""
    straight = Trainer().record()
    fresh = {event.step: event.data for event in straight.events if event.kind is Kind.STEP and event.rank == 0}
    part = {"optimizer": ("opt_step",), "schedule": ("sched_step",), "sampler": ("samples", "indices")}[broken]
    events = [
        _with(event, **{name: fresh[(event.step or 0) - 12][name] for name in part})
        if event.kind is Kind.STEP and (event.step or 0) > 12
        else event
        for event in _rolled_back(straight.events)
    ]
    history = History.of(events, straight.history)
    assert [part.base for part in history.segments] == [0, 10]
    assert len(history.segments[1].conflicts) == 1


@pytest.mark.parametrize(
    "written",
    ["ckpt-4.tmp", "ckpt-4.pt.tmp", "tmp-ckpt-4.pt", "ckpt-4.pt.tmp.123", ".~ckpt-4.pt", "_tmp_ckpt-4", ".ckpt-4.pt",
     "ckpt-4.partial.0", "ckpt-4.pt~", "../scratch/ckpt-4.pt", "ckpt-4"],
)  # fmt: skip
def test_a_file_is_known_whatever_it_was_called_before(written: str) -> None:
    """The names that files have until they are whole, with another suffix or in another folder at that."""
    events = [
        Event(kind, "rank0-a0", n, 0.0, float(n), 0, 0, 15, {"path": f"/out/{written}", "format": "torch", "ok": True})
        for n, kind in enumerate(_SAVES)
    ]
    found = saved_as("/out/ckpt-4.pt", History.of([*Trainer(steps=1).record().events, *events]).saves)
    assert found is not None
    assert found.local_step == 15
    assert saved_as("/out/ckpt-5.pt", [found]) is None


def test_names_that_are_whole_stay_as_they_are() -> None:
    """Words that look like those of an unfinished name, and folders that hold all checkpoints."""
    for name in (
        "/out/step-20/model.pt",
        "/out/__0_0.distcp",
        "/out/attempt-4.pt",
        "/out/template.pt",
        "/out/departed-3",
        "/data/runs-part/job/step-20.pt",
        "/home/me/.cache/out.tmp/step-20/model.pt",
        "/data/runs-part/model.pt",
    ):
        assert final_path(name) == name
    assert final_path("/out/step-4.tmp/__0_0.distcp") == "/out/step-4/__0_0.distcp"


def test_a_resume_that_makes_no_step_is_placed_by_its_load() -> None:
    """A job that makes no step after its load has lost the steps since that checkpoint, whether it dies or holds itself
    done; not if it ends well with an older one than it had, which may have been for an evaluation."""
    run = Trainer(kills=[(18, 1)]).record()
    first = next(n for n, event in enumerate(run.events) if event.kind is Kind.STEP and event.attempt == 1)
    events = list(run.events[:first])
    history = History.of(events)
    assert [one.base for one in history.attempts] == [0, 15]
    assert (history.last_step, history.highest_step()) == (15, 17)
    ends = [event for event in run.events[first:] if event.kind is Kind.RANK_EXITED]
    assert History.of([*events, *ends]).last_step == 15
    held = {"path": "/job/checkpoints/step-10", "numbers": {"step": 10}}
    older = [_with(e, **held) if e.kind is Kind.LOAD_END else e for e in events]
    assert History.of([*older, *ends]).last_step == 17
    assert History.of(older).last_step == 10


def _inventory(step: int) -> dict[str, Any]:
    one = {
        "path": f"step-{step}", "format": "dcp", "step": step, "complete": True, "loadable": True, "problem": None,
        "tensors": {"weight": "w"}, "values": {}, "bytes": 10,
    }  # fmt: skip
    return {"inventory": {"root": "/job/checkpoints", "checkpoints": [one]}}


def test_ranks_that_make_different_numbers_of_steps_have_those_in_common_that_all_made() -> None:
    """Uneven inputs: up to the step at which a rank has no more data, all ranks have a common step. After a later one,
    nobody can give one global step to all ranks, and that is what is said."""
    run = Trainer(kills=[(18, 1)]).record()
    assert run.history.unplaced == ()

    def without(attempt: int) -> Record:
        gone = [
            e for e in run.events if e.kind is Kind.STEP and (e.attempt, e.rank) == (attempt, 1) and (e.step or 0) > 11
        ]
        return Record(run.plan, tuple(event for event in run.events if event not in gone), {})

    later = without(1)
    assert (later.history.uneven, later.history.unplaced) == ((15, 11), ())
    uneven = without(0)
    assert uneven.history.unplaced == (1,)
    assert "17 and 11" in why_unplaced(uneven, (1,))
    twin = replace(Trainer().record(), artifacts=_inventory(30))
    for assertion in (NoLostWork(), CheckpointIntegrity()):
        finding = assertion.judge(replace(uneven, artifacts=_inventory(15)), [twin])
        assert (finding.outcome, "different numbers of steps" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    failed = Event(Kind.AGENT_FAILED, "rank1-a0", 9999, 0.0, 0.0, 1, 0, 0, {"hook": "steps", "error": "it broke"})
    assert History.of([*uneven.events, failed]).unplaced == (), "its steps were not all seen"


def test_ranks_that_went_on_alone_when_another_died_have_a_common_step() -> None:
    """As with local SGD: no rank waits for the others at each step, and those that live go on until they have to. All
    made equal numbers of steps in the attempt that ended well, and all made the step of the checkpoint."""
    run = Trainer(kills=[(18, 1)]).record()
    steps = [e for e in run.events if e.kind is Kind.STEP and (e.attempt, e.rank) == (0, 0)]
    early = {after.seq: step.mono_s + 1e-4 for step, after in zip(steps, steps[2:], strict=False)}
    late = [e for e in run.events if e.kind is Kind.STEP and (e.attempt, e.rank) == (0, 1) and (e.step or 0) > 15]
    events = [event for event in run.events if event not in late]
    history = History.of([replace(event, mono_s=early.get(event.seq, event.mono_s)) for event in events])
    assert (history.uneven, history.unplaced) == ((17, 15), ())
    assert [attempt.base for attempt in history.attempts] == [0, 15]


def test_what_was_seen_of_an_attempt_that_nobody_can_place_is_said() -> None:
    """The reason names the load that was seen, and claims none that was not."""
    blind = {"counters_seen": False, "samples_seen": False, "broken": frozenset({"rng"})}
    run = Trainer(kills=[(18, 1)], loads_seen=False, **blind).record()
    assert "no load of a checkpoint was seen" in why_unplaced(run, (1,))
    at = next(event for event in run.events if event.kind is Kind.STEP and event.attempt == 1)
    seen = Record(run.plan, (*run.events, _load("/job/latest.pt", at, 0, 0)), {})
    assert seen.history.unplaced == (1,)
    assert "latest.pt was loaded, whose save was not seen" in why_unplaced(seen, (1,))


def test_recovery_by_a_rollback_within_the_process() -> None:
    """What was lost counts from the checkpoint that all ranks loaded again; recovery ends past what had been done."""
    straight = Trainer().record()
    events = _rolled_back(straight.events)
    done = [event for event in events if event.kind is Kind.STEP and event.step == 12]
    hit = {"fault": "nan", "phase": None, "global_step": 12, "pid": 1001}
    events.append(replace(done[0], kind=Kind.APPLYING, mono_s=done[0].mono_s - 0.005, rank=1, step=11, data=hit))
    run = Record(straight.plan, tuple(sorted(events, key=lambda event: event.mono_s)), {})
    recovery = recoveries(run)[0]
    again = next(e for e in run.events if e.kind is Kind.STEP and (e.step, e.rank) == (15, 1))
    assert recovery.lost_steps == 2
    assert recovery.parts["caught_up"] == pytest.approx(again.mono_s - done[0].mono_s + 0.005)
    assert (recovery.parts["restored"] or 9) < (recovery.parts["first_step"] or 0) < (recovery.parts["caught_up"] or 0)
    finding = NoLostWork().judge(run, [straight])
    assert (finding.outcome, finding.measured["lost_steps"]) == (Outcome.PASSED, 2)
    older = _rolled_back(straight.events, to=5)
    assert NoLostWork().judge(Record(straight.plan, tuple(older), {}), [straight]).outcome is Outcome.FAILED


def test_nothing_was_lost_before_the_first_step() -> None:
    """A job that was killed in its first step, and began again, lost none."""
    run = Trainer(kills=[(1, 1)]).record()
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is Outcome.PASSED
    assert "no step had been done when attempt 1 began" in finding.reason


def test_a_job_that_loads_two_checkpoints_goes_on_from_the_right_one() -> None:
    """It looks into both of its files and takes the newer: what it does next tells which, not the order of loading."""
    run = Trainer(kills=[(13, 1)]).record()
    first = {e.rank: e for e in reversed(run.events) if e.kind is Kind.STEP and e.attempt == 1}
    older = [_load("/job/checkpoints/step-5", first[rank], 0, rank, 5) for rank in first]
    found = _attempt(sorted((*run.events, *older), key=lambda e: e.mono_s))
    assert found.base == 10
    assert found.loaded == "/job/checkpoints/step-10"
    assert found.conflicts == ()


def test_optimizers_that_take_turns_are_no_return() -> None:
    """Two steps of one optimizer and one of another: the counter that is read goes up and down with each turn. The
    attempt goes straight on, and its resume is placed by the file."""
    counted = (1, 2, 1, 3, 4, 2, 5, 6, 3)

    def turn(step: int) -> int:
        return counted[(step - 1) % 9] + 6 * ((step - 1) // 9)

    events = [
        _with(event, opt_step=turn((event.step or 0) + 15 * (event.attempt or 0))) if event.kind is Kind.STEP else event
        for event in Trainer(kills=[(18, 1)]).record().events
    ]
    history = History.of(events)
    assert [(part.number, part.after, part.base) for part in history.segments] == [(0, 0, 0), (1, 0, 15)]


@pytest.mark.parametrize("logged", [False, True])
def test_numbers_that_begin_anew_in_each_phase_contradict_nothing(logged: bool) -> None:
    """A job trains in two phases and counts the steps of each: in the names of its files, in their contents, and in its
    log. All these numbers tell other steps than the state and the samples, and no defect."""
    phase = 15

    def in_phase(step: int) -> str:
        return f"/job/first/step-{step}" if step <= phase else f"/job/second/step-{step - phase}"

    events = list[Event]()
    for event in Trainer(kills=[(28, 1)], steps=34, named=True, state_seen=True).record().events:
        if "path" in event.data:
            step = int(event.data["path"].rpartition("-")[2])
            numbers = {"numbers": {"step": step - phase}} if "numbers" in event.data else {}
            event = _with(event, path=in_phase(step), **numbers)
        events.append(event)
        if logged and event.kind is Kind.STEP and event.rank == 0:
            step = (event.step or 0) + 25 * (event.attempt or 0)
            line = {"step": step if step <= phase else step - phase, "adapter": "regex", "loss": 1.0, "lr": 0.1}
            at = event.mono_s + 1e-4
            events.append(Event(Kind.LOG_STEP, "harness", 9_000 + len(events), 0.0, at, None, None, None, line))
    attempt = History.of(sorted(events, key=lambda event: event.mono_s)).attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.conflicts) == (25, ())


def test_the_file_of_a_rank_without_steps_is_of_the_step_in_its_name() -> None:
    """It saves while the others are still in the step; the file that these save after it has the same number."""
    run = Trainer(kills=[(18, 1)]).record()
    done = {(e.attempt, e.step): e.mono_s for e in run.events if e.kind is Kind.STEP and e.rank == 0}
    for early, name in ((True, "actor-{:05}.pt"), (False, "actor.pt")):
        events = list[Event]()
        for event in run.events:
            if event.kind is Kind.STEP and event.rank == 1:
                continue
            if "path" in event.data:
                step = int(event.data["path"].rpartition("-")[2])
                event = _with(event, path=f"/job/{name if event.rank else 'learner-{:05}.pt'}".format(step))
                if event.rank and event.kind in _SAVES:
                    event = replace(event, step=0, mono_s=done[event.attempt, event.step] - 1e-3)
            events.append(event)
        saves = History.of(sorted(events, key=lambda event: event.mono_s)).saves
        assert [save.global_step for save in saves if save.ranks == (1,)][:3] == ([5, 10, 15] if early else [4, 9, 14])


@pytest.mark.parametrize("moments", [(), (3,)])
@pytest.mark.parametrize(("log", "goes_on"), [((0,), False), ((3,), None), ((), None)])
def test_a_warm_up_whose_optimizer_is_not_put_back(
    log: tuple[int, ...], goes_on: bool | None, moments: tuple[int, ...]
) -> None:  # fmt: skip
    """The weights are those of the start, and the optimizer's counter, and its moments, went on. Nothing was logged
    before, so the first line of the log decides: it counts from the start, as the weights do. Without it, the step is
    not known."""
    seen = [
        Witness(MOMENTS, moments, "they were those after that step"),
        Witness(STATE, (0,), "its parameters were those of the start"),
        Witness(OPTIMIZER, (3,), "it stood at 4 when the step was over"),
        Witness(LOG, log, "its step numbers are those of the attempt"),
    ]
    part = Segment(0, 3, 1.0, 0, tuple(seen))
    assert part.counts_on(3, logged_on=None, warmed_up=True) is goes_on


def test_an_optimizer_that_is_not_put_back_is_one_witness() -> None:
    """After a warm-up the weights are those of the start. The moments and the counter, which went on, say together that
    the optimizer was not put back, and do not outweigh the weights."""
    seen = [
        Witness(STATE, (0,), "its parameters were those of the start"),
        Witness(MOMENTS, (3,), "they were those after that step"),
        Witness(OPTIMIZER, (3,), "it stood at 4 when the step was over"),
        Witness(STRAIGHT, (3,), "the attempt was at this step before", trust=0.2),
    ]
    assert decide(seen)[0] == 0
