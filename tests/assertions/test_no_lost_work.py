"""no_lost_work: a job must resume from the newest complete checkpoint; the finding names a newer one that it did not
use."""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.harness.analysis.checkpointing.resumed_from import _common, apart
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Execution, Executions, History, Save, Segment
from torchaos.harness.record.history.step_evidence import OPTIMIZER, SAMPLES, Witness
from torchaos.harness.record.record import Record


def _from(run: Any, base: int) -> Any:
    """The record of a job whose second attempt loaded the checkpoint of step `base` (0: none), and made the steps after
    it again."""
    loaded = next(event.data["numbers"]["step"] for event in run.events if event.kind is Kind.LOAD_END)
    made = {}
    for event in run.events:
        if event.kind is Kind.STEP:
            made[(event.step or 0) + loaded * (event.attempt or 0), event.rank] = event.data
    events = []
    for event in run.events:
        if event.kind is Kind.LOAD_END and event.attempt == 1:
            if base:
                path = f"/job/checkpoints/step-{base}"
                events.append(replace(event, data={**event.data, "path": path, "numbers": {"step": base}}))
        elif event.kind is Kind.STEP and event.attempt == 1:
            if (base + (event.step or 0), event.rank) in made:
                events.append(replace(event, data=made[base + (event.step or 0), event.rank]))
        else:
            events.append(event)
    return replace(run, events=tuple(events))


def test_a_resume_from_the_newest_checkpoint_passes(trainer: Any) -> None:
    """With one kill and with two, and `steps` bounds what a checkpoint interval costs."""
    assert isinstance(NoLostWork(), Assertion)
    for kills in ([(18, 1)], [(18, 1), (24, 0)]):
        finding = NoLostWork().judge(trainer(kills=kills).record(), [])
        assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured["resumes"] == 2
    tight = NoLostWork(steps=2).judge(trainer(kills=[(19, 1)]).record(), [])
    assert (tight.outcome, "3 steps were lost, and 2 are allowed" in tight.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize(
    ("kills", "attempt", "step", "reached"), [([(19, 1), (24, 0)], 1, 15, 18), ([(18, 1), (25, 0)], 2, 20, 24)]
)
def test_of_several_resumes_the_costliest_is_told(
    trainer: Any, kills: Sequence[tuple[int, int]], attempt: int, step: int, reached: int
) -> None:
    """By the number of its attempt: the two steps are of the same resume, which need not be the last."""
    finding = NoLostWork().judge(trainer(kills=kills).record(), [])
    assert finding.reason == (
        f"each of 2 resumes lost as little as possible; the costliest: attempt {attempt} went on from step {step}, the "
        f"newest complete checkpoint, after step {reached} had been done"
    )


def test_a_single_resume_has_one_sentence(trainer: Any) -> None:
    """With the step from which it went on, and the highest that had been done."""
    finding = NoLostWork().judge(trainer(kills=[(18, 1)]).record(), [])
    told = "attempt 1 went on from step 15, the newest complete checkpoint, after step 17 had been done"
    assert finding.reason == told


def test_an_older_checkpoint_is_told(trainer: Any) -> None:
    """Which one was taken, which one was there, and how many steps that cost."""
    finding = NoLostWork().judge(_from(trainer(kills=[(18, 1)]).record(), 10), [])
    assert finding.outcome is Outcome.FAILED
    assert "went on from step 10, although the checkpoint of step 15 (step-15)" in finding.reason
    assert "it chose the wrong checkpoint as the newest" in finding.reason
    assert finding.measured["needless"] == 5


def test_a_start_from_scratch_is_told(trainer: Any) -> None:
    """No load at all, and the first steps are made again."""
    finding = NoLostWork().judge(_from(trainer(kills=[(18, 1)]).record(), 0), [])
    assert finding.outcome is Outcome.FAILED
    assert "started from scratch, although the checkpoint of step 15" in finding.reason


def test_a_checkpoint_that_may_not_be_complete_decides_nothing(trainer: Any) -> None:
    """One that was written to its end just before the kill may lack its marker: to pass it over is no proof."""
    run = _from(trainer(kills=[(16, 1)]).record(), 10)
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert (
        "and not from the newer checkpoint of step 15 (step-15), which may have been incomplete: its files"
        in finding.reason
    )


def _by_a_child(run: Any, forked_at: int | None, ended: bool) -> Any:
    """With checkpoints that a child of rank 0 writes, forked for each save (None), or once, after so many steps."""
    events = []
    for event in run.events:
        if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END):
            events.append(event)
        elif event.rank == 0:
            child = 7000 + (0 if forked_at is not None else event.step)
            about = {"child": child, "blocked_s": 0.0} if event.kind is Kind.SAVE_END else {"child": child}
            made = replace(event, step=event.step if forked_at is None else forked_at, data={**event.data, **about})
            events.append(made)
            if event.kind is Kind.SAVE_END and ended:
                events.append(replace(made, kind=Kind.WRITER_ENDED, data={"child": child}))
    return replace(run, events=tuple(events))


def test_checkpoints_of_forked_children_count(trainer: Any) -> None:
    """A child that ended in order was done with the checkpoint of step 15; of a child that may still have had something
    to do, nobody knows. A child that lives on says with its next save that it was done with the one before."""
    run = trainer(kills=[(18, 1)]).record()
    for base, forked_at, ended, outcome in (
        (15, None, True, Outcome.PASSED),
        (10, None, True, Outcome.FAILED),
        (10, None, False, Outcome.INCONCLUSIVE),
        (15, 0, False, Outcome.PASSED),
        (10, 0, False, Outcome.INCONCLUSIVE),
        (5, 0, False, Outcome.FAILED),
    ):
        finding = NoLostWork().judge(_from(_by_a_child(run, forked_at, ended), base), [])
        assert finding.outcome is outcome, (base, forked_at, ended, finding.reason)


def test_a_save_that_a_rank_never_finished_is_no_checkpoint(trainer: Any) -> None:
    """Step 15 lacks the end of rank 1's part: going back to step 10 loses nothing that could be had."""
    run = _from(trainer(kills=[(18, 1)]).record(), 10)
    events = [
        event for event in run.events
        if not (event.kind is Kind.SAVE_END and (event.rank, event.step, event.attempt) == (1, 15, 0))
    ]  # fmt: skip
    finding = NoLostWork().judge(replace(run, events=tuple(events)), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_a_load_proves_that_a_save_was_complete(trainer: Any) -> None:
    """The only checkpoint lacks the end of rank 1's part, since rank 1 was killed just then. The next attempt loaded
    it, so it was complete. That says nothing if the attempt saved it again before the load."""
    run = trainer(kills=[(8, 1)]).record()
    events = [
        event for event in run.events
        if not (event.kind is Kind.SAVE_END and (event.rank, event.step, event.attempt) == (1, 5, 0))
    ]  # fmt: skip
    found = NoLostWork().judge(replace(run, events=tuple(events)), [])
    assert (found.outcome, found.measured.get("newest")) == (Outcome.PASSED, 5), found.reason
    loaded = next(n for n, event in enumerate(events) if event.kind is Kind.LOAD_BEGIN)
    again = [
        replace(event, attempt=1, step=0, mono_s=events[loaded].mono_s - 1e-6)
        for event in events if event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) and (event.rank, event.step) == (0, 5)
    ]  # fmt: skip
    found = NoLostWork().judge(replace(run, events=(*events[:loaded], *again, *events[loaded:])), [])
    assert found.outcome is Outcome.INCONCLUSIVE, found.reason


def test_a_load_of_the_file_that_was_to_be_replaced(trainer: Any) -> None:
    """A job saves under one name, by a rename that the agent does not see. It died in the save of step 12, and the next
    attempt loaded the file of step 10, which still had that name. That load does not prove the save of step 12."""
    run = trainer(kills=[(13, 0)]).record()
    first = [event for event in run.events if event.attempt == 0]
    begun = [event for event in first if event.kind is Kind.SAVE_BEGIN and event.step == 10]
    done_s = max(event.mono_s for event in first if event.kind is Kind.STEP and event.step == 12)
    begun = [replace(event, step=12, seq=event.seq + 10_000, mono_s=done_s + 1e-6) for event in begun]
    events = sorted((*run.events, *begun), key=lambda event: event.mono_s)
    one_name = (
        replace(event, data={**event.data, "path": "/job/checkpoints/last.pt"}) if "path" in event.data else event
        for event in events
    )
    run = replace(run, events=tuple(one_name))
    assert run.history.attempts[1].base == 10
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_a_save_in_the_background_is_sure_only_when_the_next_began(trainer: Any) -> None:
    """What a thread writes may not be renamed yet when training goes on: that is inconclusive."""
    run = _from(trainer(kills=[(18, 1)], save_s=0.0).record(), 10)
    late = tuple(
        replace(event, mono_s=event.mono_s + 0.03) if event.kind is Kind.SAVE_END else event for event in run.events
    )
    finding = NoLostWork().judge(replace(run, events=late), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_the_only_checkpoint_was_taken_whether_it_is_sure_or_not(trainer: Any) -> None:
    """One save, in the background, and a kill soon after: that the job went on from it shows that it was complete, and
    there was no newer one to lose work by."""
    run = trainer(kills=[(8, 1)], save_s=0.0).record()
    late = tuple(
        replace(event, mono_s=event.mono_s + 0.05) if event.kind is Kind.SAVE_END and event.attempt == 0 else event
        for event in run.events
    )
    found = NoLostWork().judge(replace(run, events=late), [])
    assert found.outcome is Outcome.PASSED, found.reason
    assert (found.measured["base"], found.measured["newest"]) == (5, 5)


def test_before_the_first_checkpoint_there_is_nothing_to_lose(trainer: Any) -> None:
    """Killed in step 3, it starts from scratch. That is all it could do, as long as every checkpoint that lies there
    was seen saved: else there may have been one."""
    listed = [{"path": f"step-{step}", "format": "dcp", "step": step} for step in (5, 10)]
    for paths, outcome in ((listed, Outcome.PASSED), ([*listed, {"path": "other"}], Outcome.INCONCLUSIVE)):
        run = trainer(kills=[(3, 1)], steps=12).record(inventory={"root": "/job/checkpoints", "checkpoints": paths})
        found = NoLostWork().judge(run, [])
        assert found.outcome is outcome, found.reason
    assert NoLostWork().judge(trainer(kills=[(3, 1)], steps=12).record(), []).outcome is Outcome.INCONCLUSIVE


def test_what_is_not_there_or_not_known_is_inconclusive(trainer: Any) -> None:
    """One that came back and made no step, and one of which nobody can say where it went on. One that was never
    restarted has lost nothing."""
    assert NoLostWork().judge(trainer().record(), []).outcome is Outcome.PASSED
    idle = trainer(kills=[(18, 1)]).record()
    gone = tuple(e for e in idle.events if not (e.kind is Kind.STEP and e.attempt == 1))
    assert NoLostWork().judge(replace(idle, events=gone), []).outcome is Outcome.INCONCLUSIVE
    run = trainer(kills=[(18, 1)], loads_seen=False, counters_seen=False, samples_seen=False, losses_seen=False)
    record = run.record()
    assert History.of(record.events).unplaced
    assert NoLostWork().judge(record, []).outcome is Outcome.INCONCLUSIVE


def _with_extra(run: Any, steps: set[int], name: str = "/job/checkpoints/best.pt") -> Any:
    """The record of a job that wrote another file too, after these local steps of its first attempt."""
    events = []
    for event in run.events:
        events.append(event)
        if event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) and event.attempt == 0 and event.step in steps:
            path = name.format(path=event.data["path"])
            events.append(replace(event, data={**event.data, "path": path}, seq=10_000 + event.seq))
    return replace(run, events=tuple(events))


def test_an_extra_file_makes_no_other_checkpoint_incomplete(trainer: Any) -> None:
    """Step 5 was the best so far and has a file more; to pass over step 15, which has what most have, is a failure."""
    run = _with_extra(_from(trainer(kills=[(18, 1)]).record(), 5), {5})
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "though the checkpoint of step 15" in finding.reason


def test_a_checkpoint_that_lacks_what_most_have_decides_nothing(trainer: Any) -> None:
    """Steps 5 and 10 have a file that step 15 lacks: it may be an extra, or 15 may be cut short."""
    run = _from(trainer(steps=20, kills=[(18, 1)]).record(), 10)
    run = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.SAVE_BEGIN or e.attempt == 0))
    run = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.SAVE_END or e.attempt == 0))
    finding = NoLostWork().judge(_with_extra(run, {5, 10}, "{path}/index"), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert (
        "of step 15 (step-15), which may have been incomplete: it lacks index, which most checkpoints have"
        in finding.reason
    )


def _holding(run: Any, best: tuple[str, ...]) -> Any:
    """With an inventory in which step-20 has two entries, and best.pt these."""
    whole = {"complete": True, "loadable": True}
    step = {"path": "step-20", "tensors": {"model.weight": "a", "optimizer.momentum": "b"}, **whole}
    other = {"path": "best.pt", "tensors": dict.fromkeys(best, "c"), **whole}
    inventory = {"root": "/job/checkpoints", "checkpoints": [step, other]}
    return replace(run, artifacts={**run.artifacts, "inventory": inventory})


def test_a_folder_of_another_tier_counts_if_an_attempt_went_on_from_it(trainer: Any) -> None:
    """The job saves into memory and copies some saves to the folder that the scenario names. Its newest save is the one
    in memory, whatever the folder has; a save there that it passes over was lost needlessly."""

    run = trainer(kills=[(18, 1)]).record(inventory={"root": "/job/disk", "checkpoints": []})
    assert all(save.path.startswith("/job/checkpoints/") for save in run.history.saves)
    newest = NoLostWork().judge(run, [])
    assert newest.outcome is Outcome.PASSED, newest.reason
    assert "from step 15, the newest complete checkpoint" in newest.reason
    older = NoLostWork().judge(_from(run, 10), [])
    assert older.outcome is Outcome.FAILED, older.reason


def test_what_no_attempt_ever_resumed_from_is_no_checkpoint_to_resume_from(trainer: Any) -> None:
    """best.pt of step 16 holds weights alone: the job goes on from step 15, and nothing was lost needlessly. One that
    holds all that step-15 holds could have been taken, and so could a newer file of the kind that was loaded."""
    run = _with_extra(trainer(every=1, kills=[(18, 1)]).record(), {8, 16})
    saving = (Kind.SAVE_BEGIN, Kind.SAVE_END)
    events = tuple(e for e in run.events if e.kind not in saving or "best" in e.data["path"] or not e.step % 5)
    run = _from(replace(run, events=events), 15)
    finding = NoLostWork().judge(_holding(run, ("model.weight",)), [])
    assert finding.outcome is Outcome.PASSED, finding.reason
    finding = NoLostWork().judge(_holding(run, ("model.weight", "optimizer.momentum", "metric")), [])
    assert (finding.outcome, "step 16 (best.pt) was already complete" in finding.reason) == (Outcome.FAILED, True)
    older = NoLostWork().judge(_holding(_from(run, 10), ("model.weight",)), [])
    assert (older.outcome, "checkpoint of step 15 (step-15)" in older.reason) == (Outcome.FAILED, True), older.reason


@pytest.mark.parametrize("files", [("emergency/all.pt",), ("emergency/weights.pt", "emergency/rest.pt")])
@pytest.mark.parametrize("lacks", [(), ("momentum",)])
def test_a_save_with_all_state_is_a_checkpoint_whatever_its_entries_are_called(
    trainer: Any, files: tuple[str, ...], lacks: tuple[str, ...]
) -> None:  # fmt: skip
    """An emergency save after step 16 holds, bit for bit, the parameters and moments that the job had: to go on from
    step 15 loses a step. One that lacks the moments can't be resumed from."""
    run = trainer(every=1, kills=[(18, 1)]).record()
    saving, events = (Kind.SAVE_BEGIN, Kind.SAVE_END), list[Event]()
    for event in run.events:
        if event.kind in saving and event.attempt == 0 and event.step == 16:
            for number, name in enumerate(files):
                data = {**event.data, "path": f"/job/checkpoints/{name}"}
                events.append(replace(event, data=data, mono_s=event.mono_s + 1e-6 * number, seq=10_000 + event.seq))
                sums = {"parameters": {"w": ["float32 4", f"{7:016x}"]}, "moments": {"w/m": ["float32 4", f"{9:016x}"]}}
                if event.kind is Kind.SAVE_BEGIN:
                    events.append(replace(events[-1], kind=Kind.KEPT, seq=20_000 + event.seq + number, data=sums))
        elif event.kind not in saving or not event.step or not event.step % 5:
            events.append(event)
    held = {"model.weight": 7, **({} if lacks else {"momentum": 9})}
    of_files = [held] if len(files) == 1 else [{name: total} for name, total in held.items()]
    step = {"path": "step-15", "tensors": {"net": "a", "opt": "b"}, "complete": True, "loadable": True, "step": 15}
    others = [
        {**step, "path": name, "step": 16, "tensors": dict.fromkeys(of, "c"),
         "sketches": {entry: [total] for entry, total in of.items()}}
        for name, of in zip(files, of_files, strict=False)
    ]  # fmt: skip
    inventory = {"root": "/job/checkpoints", "checkpoints": [step, *others]}
    run = _from(replace(run, events=tuple(events), artifacts={**run.artifacts, "inventory": inventory}), 15)
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is (Outcome.PASSED if lacks else Outcome.FAILED), finding.reason
    assert ("the checkpoint of step 16 (" in finding.reason) is not bool(lacks)


def test_a_save_in_which_a_rank_had_no_part_is_no_checkpoint(trainer: Any) -> None:
    """Rank 1 never began its part of step 15: going back to step 10 loses nothing that could be had."""
    run = _from(trainer(kills=[(18, 1)]).record(), 10)
    saving = (Kind.SAVE_BEGIN, Kind.SAVE_END)
    events = tuple(e for e in run.events if not (e.kind in saving and (e.rank, e.step, e.attempt) == (1, 15, 0)))
    finding = NoLostWork().judge(replace(run, events=events), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def _died(run: Any) -> Any:
    """Cut at the kill: the job ends with exit code 1, and is never started again."""
    alive = [event for event in run.events if not event.attempt]
    at = next(place for place, event in enumerate(alive) if event.kind is Kind.ELASTIC_RENDEZVOUS)
    end = replace(alive[at], kind=Kind.JOB_EXITED, data={"submission": 0, "pid": 50, "exit_code": 1})
    return replace(run, events=(*alive[:at], end))


def test_one_attempt_that_died_lost_what_it_had(trainer: Any) -> None:
    """A job that was killed and never came back is no job that lost nothing; nor is it known that it lost."""
    finding = NoLostWork(steps=0).judge(_died(trainer(kills=[(13, 1)]).record()), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "exit code 1" in finding.reason


def test_a_restart_that_only_a_log_could_tell_of_decides_nothing(trainer: Any) -> None:
    """Without an agent a restart in place leaves one attempt to see: that it was never restarted can't be said."""
    run = trainer(kills=[(13, 1)], log_only=1).record()
    unseen = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.RANK_UP))
    assert len(unseen.history.attempts) == 1
    assert NoLostWork().judge(unseen, []).outcome is Outcome.INCONCLUSIVE


def test_an_agent_that_saw_no_step_would_have_seen_a_restart(trainer: Any) -> None:
    """The steps are known by the job's log alone, and an agent was in each rank."""
    run = trainer(log_only=1).record()
    assert run.history.source == "log"
    assert NoLostWork().judge(run, []).outcome is Outcome.INCONCLUSIVE
    started = Event(
        Kind.AGENT_STARTED, "rank0-a0", 0, 0.0, run.events[0].mono_s, 0, 0, None, {"pid": 1000, "torch": "2"}
    )
    finding = NoLostWork().judge(replace(run, events=(started, *run.events)), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_one_attempt_that_was_ended_on_purpose_passes(trainer: Any) -> None:
    """All had been seen that was to be seen: it lost nothing until then."""
    run = trainer().record()
    done = replace(run.events[-1], kind=Kind.STOPPED, data={"reason": "", "interrupted": False, "enough": True})
    finding = NoLostWork().judge(replace(run, events=(*run.events[:-1], done)), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


class _Counted(Executions):
    """Executions that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Execution]:
        self.times += 1
        return super().__iter__()

    def column(self, name: str) -> Any:
        self.times += 1
        return super().column(name)


def test_more_checkpoints_are_judged_in_one_go(trainer: Any) -> None:
    """The executions are gone through as often for 40 checkpoints as for 4, and not once for each."""

    def gone_through(every: int) -> int:
        run = trainer(steps=40, every=every, kills=[(38, 1)]).record()
        seen = _Counted.of(run.history.executions)
        run.__dict__["history"] = replace(run.history, executions=seen)
        assert NoLostWork().judge(run, []).outcome is Outcome.PASSED
        return seen.times

    assert gone_through(1) == gone_through(10) > 0


def test_a_copy_in_memory_that_is_written_later(trainer: Any) -> None:
    """The training thread writes, four steps later, the state that it copied to memory: the checkpoint is of the step
    that its name and its load say, and not of the step at which it was written."""

    class Later(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            super()._step(attempt, world, state, step, local)
            if step % self.every == 4 and step > 4 and local > 4:
                data = {"path": f"/job/checkpoints/step-{step - 4}", "format": "dcp"}
                for kind, more in ((Kind.SAVE_BEGIN, {}), (Kind.SAVE_END, {"ok": True, "blocked_s": 0.1})):
                    for rank in range(world):
                        self.emit(kind, {**data, **more}, rank, attempt, local)

        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            self._saved[step] = copy.deepcopy(state)

    found = NoLostWork().judge(Later(every=5, kills=((10, 1),)).record(), ())
    assert found.outcome is Outcome.PASSED, found.reason


def test_each_rank_writes_its_part_of_a_copy_in_memory_later(trainer: Any) -> None:
    """Rank 0 three steps later, rank 1 four: both parts are of the step in their name, and none is newer."""

    class Staggered(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            super()._step(attempt, world, state, step, local)
            for rank in range(world):
                if (saved := step - 3 - rank) > 0 and saved % self.every == 0 and local > 3 + rank:
                    data = {"path": f"/job/checkpoints/step-{saved}/part-{rank}", "format": "torch"}
                    for kind, more in ((Kind.SAVE_BEGIN, {}), (Kind.SAVE_END, {"ok": True, "blocked_s": 0.1})):
                        self.emit(kind, {**data, **more}, rank, attempt, local)

        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            self._saved[step] = copy.deepcopy(state)

    run = Staggered(every=5, kills=((10, 1),)).record()
    found = NoLostWork().judge(run, ())
    assert found.outcome is Outcome.PASSED, found.reason
    assert {save.global_step for save in run.history.saves} == {5, 10, 15, 20, 25}


def test_a_rank_that_resumes_from_another_step_than_the_rest(trainer: Any) -> None:
    """Rank 2 of 3 loads its own file of step 10, the others theirs of step 15. Its optimizer's counter says whether it
    kept that state. Without a counter nothing says it."""
    run = trainer(kills=[(18, 1)], world=3).record(inventory={"root": "/job/checkpoints", "checkpoints": []})

    def with_rank_2(counter: Callable[[int], int | None]) -> Any:
        events = []
        for event in run.events:
            data = dict(event.data)
            if (event.rank, event.attempt) == (2, 1) and event.kind is Kind.LOAD_END:
                data |= {"path": "/job/checkpoints/step-10", "numbers": {"step": 10}}
            if (event.rank, event.attempt) == (2, 1) and event.kind is Kind.STEP:
                data |= {"opt_step": counter(event.step)}
            events.append(replace(event, data=data))
        return replace(run, events=tuple(events))

    kept = NoLostWork().judge(with_rank_2(lambda local: 10 + local), [])
    assert (kept.outcome, kept.measured["ranks"]) == (Outcome.FAILED, [2])
    assert "went on from step 15, but rank 2 loaded the checkpoint of step 10" in kept.reason
    late = with_rank_2(lambda local: 10 + local)
    late = replace(late, events=tuple(
        replace(e, data={**e.data, "losses": [9.0]}) if (e.kind, e.rank, e.attempt) == (Kind.STEP, 2, 1) else e
        for e in late.events
    ))  # fmt: skip
    reason = LossContinuity().judge(late, [trainer(world=3).record()]).reason
    assert "confirms: step-10 was saved after step 10" in kept.reason
    assert "rank 2 loaded the checkpoint of step 10, and the others that of step 15" in reason
    replaced = NoLostWork().judge(with_rank_2(lambda local: 15 + local), [])
    assert replaced.outcome is Outcome.PASSED, replaced.reason
    unknown = NoLostWork().judge(with_rank_2(lambda _local: None), [])
    assert unknown.outcome is Outcome.INCONCLUSIVE
    assert "rank 2 loaded a checkpoint of step 10" in unknown.reason


def test_a_save_that_was_not_seen_is_told(trainer: Any) -> None:
    """A job may save to a buffer and write the bytes itself. Its checkpoints lie there at the end, and nothing shows
    when they were complete: if none was seen, and if one is newer than that from which the job resumed."""

    def judged(base: int, unseen: set[int], lies_there: int) -> Any:
        entry = {
            "path": f"step-{lies_there}", "format": "dcp", "step": lies_there, "complete": True, "loadable": True,
            "problem": None, "tensors": {}, "values": {},
        }  # fmt: skip
        run = _from(
            trainer(kills=[(18, 1)]).record(inventory={"root": "/job/checkpoints", "checkpoints": [entry]}), base
        )
        saves = (Kind.SAVE_BEGIN, Kind.SAVE_END)
        kept = (e for e in run.events if e.kind not in saves or int(e.data["path"].rpartition("-")[2]) not in unseen)
        return NoLostWork().judge(replace(run, events=tuple(kept)), [])

    none = judged(15, set(range(31)), 15)
    assert none.outcome is Outcome.INCONCLUSIVE
    assert "no checkpoint was seen to be complete before it: nothing shows when step-15 was saved" in none.reason
    newer = judged(10, {15}, 15)
    assert newer.outcome is Outcome.INCONCLUSIVE
    assert "step-15 (step 15) is there at the end, and its save was not seen" in newer.reason
    assert judged(10, {15}, 20).outcome is Outcome.PASSED, "it is of a step that was done only after the resume"


def _without_loads(run: Any) -> Any:
    return replace(run, events=tuple(event for event in run.events if event.kind is not Kind.LOAD_END))


def _until_killed(run: Record, *kinds: Kind) -> Event:
    """The last event of these kinds of rank 0 in the first attempt."""
    return [event for event in run.events if event.kind in kinds and (event.attempt, event.rank) == (0, 0)][-1]


def _and(run: Any, *more: Event) -> Any:
    return replace(run, events=tuple(sorted((*run.events, *more), key=lambda event: event.mono_s)))


def test_a_checkpoint_that_the_job_removed_is_not_said_to_be_there(trainer: Any) -> None:
    """The job removed it before the next one was complete: the work is lost, and the reason says by what, whether the
    attempt began from the start or from an older checkpoint, and whether a folder went, or a file of it."""
    run = trainer(kills=[(18, 1)]).record()
    last = _until_killed(run, Kind.STEP)
    for base, path, attempt, says in (
        (0, "/job/checkpoints/step-15", 0, "the job removed it before a newer one was complete"),
        (0, "/job/checkpoints", 0, "the job removed it before a newer one was complete"),
        (10, "/job/checkpoints/step-15", 0, "the job removed it before a newer one was complete"),
        (0, "/job/checkpoints/step-15", 1, "attempt 1 itself removed it before its first step"),
    ):
        at_s = last.mono_s + 1e-6 if attempt == 0 else _first_step(run).mono_s - 1e-6
        gone = replace(last, kind=Kind.REMOVED, attempt=attempt, mono_s=at_s, seq=9_999, data={"path": path})
        finding = NoLostWork().judge(_from(_and(run, gone), base), [])
        assert finding.outcome is Outcome.FAILED, finding.reason
        assert "the checkpoint of step 15 (step-15) had been complete, but " + says in finding.reason
        assert f"{15 - base} steps were lost needlessly" in finding.reason
        assert "most likely" not in finding.reason
    other = replace(gone, data={"path": "/job/checkpoints/step-5"})
    assert "was already complete" in NoLostWork().judge(_from(_and(run, other), 10), []).reason


def _first_step(run: Record) -> Event:
    return next(event for event in run.events if event.kind is Kind.STEP and event.attempt == 1)


def test_a_checkpoint_that_was_overwritten_is_not_said_to_be_there(trainer: Any) -> None:
    """Each save writes last.pt anew. The job died while it wrote the file again: the complete one was gone by then."""
    run = trainer(kills=[(18, 1)]).record()
    last, begun = _until_killed(run, Kind.STEP), _until_killed(run, Kind.SAVE_BEGIN)
    run = _and(_from(run, 0), replace(begun, step=last.step, mono_s=last.mono_s + 1e-6, seq=9_999))
    named = (
        replace(e, data={**e.data, "path": "/job/checkpoints/last.pt"}) if "path" in e.data else e for e in run.events
    )
    finding = NoLostWork().judge(replace(run, events=tuple(named)), [])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "(last.pt) had been complete, but the save of step 17 began to write over it" in finding.reason


def test_a_checkpoint_without_a_load_may_be_gone(trainer: Any) -> None:
    """Without a load, that the job did not find the checkpoint is said only if it is there at the end."""
    entry = {
        "path": "step-15", "format": "dir", "step": 15, "complete": True, "loadable": True,
        "problem": None, "tensors": {}, "values": {},
    }  # fmt: skip
    for there, says in (([entry], "It is there at the end"), ([], "whether this one was still there is not known")):
        run = trainer(kills=[(18, 1)]).record(inventory={"root": "/job/checkpoints", "checkpoints": there})
        again = (Kind.SAVE_BEGIN, Kind.SAVE_END)
        run = _from(run, 0)
        kept = tuple(event for event in run.events if event.attempt == 0 or event.kind not in again)
        finding = NoLostWork().judge(replace(run, events=kept), [])
        assert (finding.outcome, says in finding.reason) == (Outcome.FAILED, True), finding.reason
        assert ("most likely" in finding.reason) is bool(there)


@pytest.mark.parametrize(
    ("there", "says"), [(True, "chose the wrong"), (False, "It loaded step-10. Whether the newer")]
)
def test_an_older_checkpoint_whose_newer_one_may_be_gone(trainer: Any, there: bool, says: str) -> None:
    """It is not there at the end, and nobody saw who removed it: the job may not have had a choice."""
    entry = {
        "path": "step-15", "format": "dir", "step": 15, "complete": True, "loadable": True,
        "problem": None, "tensors": {}, "values": {},
    }  # fmt: skip
    run = trainer(kills=[(18, 1)]).record(inventory={"root": "/job/checkpoints", "checkpoints": [entry] * there})
    run = _from(run, 10)
    finding = NoLostWork().judge(run, [])
    assert finding.outcome is Outcome.FAILED
    assert says in finding.reason
    assert ("had been complete" in finding.reason) is not there


def test_no_step_again_is_no_work_lost(trainer: Any) -> None:
    """The job went on from the highest step that was done, from a source that was not seen, such as memory: nothing can
    have been lost, whether an older checkpoint was seen or none."""
    run = trainer(kills=[(18, 1)]).record()
    saves = (Kind.SAVE_BEGIN, Kind.SAVE_END)
    for seen in (True, False):
        kept = tuple(event for event in run.events if seen or event.kind not in saves)
        finding = NoLostWork().judge(_without_loads(_from(replace(run, events=kept), 17)), [])
        assert finding.outcome is Outcome.PASSED, finding.reason
        assert "went on from step 17, the highest step that had been done: no step was done again" in finding.reason


def test_a_source_that_was_not_seen_is_said(trainer: Any) -> None:
    """Some steps were done again, and the job went on from a later step than that of the newest checkpoint that was
    seen: nothing shows which others were there."""
    finding = NoLostWork().judge(_without_loads(_from(trainer(kills=[(19, 1)]).record(), 17)), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "went on from step 17, from a source that was not seen" in finding.reason
    assert "The newest checkpoint that was seen is of step 15 (step-15)" in finding.reason
    assert "whether one of a later step than 17 was there is not known" in finding.reason


def test_copies_that_no_file_holds_are_judged_by_the_bound_alone(trainer: Any) -> None:
    """The job keeps its copies in memory, and the scenario names no folder: what was lost is known, and whether a newer
    copy was there is not. Without a bound, or with a folder in which saves may have been missed, nothing is decided."""
    run = _without_loads(_from(trainer(kills=[(19, 1)]).record(), 17))
    kept = tuple(event for event in run.events if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END))
    nowhere = replace(run.plan, job=replace(run.plan.job, checkpoints=None))
    run = replace(run, events=kept, plan=nowhere)
    finding = NoLostWork(steps=1).judge(run, [])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "went on from step 17 after step 18 had been done: 1 step was lost, and 1 is allowed" in finding.reason
    assert "No file was seen to hold a checkpoint, so whether a newer copy was in memory is not known" in finding.reason
    assert NoLostWork(steps=0).judge(run, []).outcome is Outcome.FAILED
    unbound = NoLostWork().judge(run, [])
    assert (unbound.outcome, "give `steps`" in unbound.reason) == (Outcome.INCONCLUSIVE, True), unbound.reason
    named = replace(run, plan=replace(nowhere, job=replace(nowhere.job, checkpoints="/job/checkpoints")))
    assert NoLostWork(steps=1).judge(named, []).outcome is Outcome.INCONCLUSIVE
    unread = replace(named, artifacts={**named.artifacts, "inventory": {"root": "/job/checkpoints", "checkpoints": []}})
    assert NoLostWork(steps=1).judge(unread, []).outcome is Outcome.PASSED
    assert "in a format that is not read here, give `steps`" in NoLostWork().judge(unread, []).reason


def test_a_rename_is_of_the_file_that_is_there(trainer: Any) -> None:
    """Each save writes last.tmp and renames it to last.pt. A save was interrupted by the kill after step 7. The next
    attempt loads last.pt, of step 5, and later saves and renames last.tmp itself: the interrupted save never was
    last.pt."""
    run = trainer(kills=[(8, 1)]).record()
    events: list[Event] = []
    for event in run.events:
        if "path" in event.data:
            name = "last.pt" if event.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) else "last.tmp"
            event = replace(event, data={**event.data, "path": f"/job/checkpoints/{name}"})
        events.append(event)
        if event.kind is Kind.SAVE_END and event.rank == 0:
            moved = {"path": "/job/checkpoints/last.tmp", "to": "/job/checkpoints/last.pt"}
            events.append(replace(event, kind=Kind.RENAMED, mono_s=event.mono_s + 1e-6, data=moved))
    done = max(event.mono_s for event in events if event.kind is Kind.STEP and event.attempt == 0)
    for rank in (0, 1):
        begun = next(event for event in events if event.kind is Kind.SAVE_BEGIN and event.rank == rank)
        events.append(replace(begun, mono_s=done + 1e-6, step=7))
    run = replace(run, events=tuple(sorted(events, key=lambda event: event.mono_s)))
    found = NoLostWork().judge(run, [])
    assert (found.outcome, found.measured.get("newest")) == (Outcome.PASSED, 5), found.reason


def test_a_checkpoint_that_a_start_from_scratch_destroys_is_told(trainer: Any) -> None:
    """The attempt passed the newest checkpoint by, and then removed it or wrote over it. A removal after it had got as
    far again is rotation, and is not told."""
    run = _from(trainer(kills=[(8, 1)]).record(), 0)
    steps = [event for event in run.events if event.kind is Kind.STEP and (event.attempt, event.rank) == (1, 0)]
    for after, told in ((steps[2], True), (steps[6], False)):
        gone = replace(
            after, kind=Kind.REMOVED, mono_s=after.mono_s + 1e-6, seq=9_999, data={"path": "/job/checkpoints/step-5"}
        )
        finding = NoLostWork().judge(_and(run, gone), [])
        assert "5 steps were lost needlessly" in finding.reason
        assert ("The attempt then removed step-5." in finding.reason) == told, finding.reason
    run = _from(trainer(kills=[(18, 1)]).record(), 0)
    named = (
        replace(e, data={**e.data, "path": "/job/checkpoints/last.pt"}) if "path" in e.data else e for e in run.events
    )
    finding = NoLostWork().judge(replace(run, events=tuple(named)), [])
    assert "The save of step 5 then wrote over last.pt." in finding.reason, finding.reason


def test_a_rank_that_went_on_from_an_older_copy_is_told() -> None:
    """Its file has the name of the newest step and the contents of an older one, as a peer's copy that came late. The
    optimizer's counter and the samples both show it; one of them alone is no proof."""
    counter = Witness(OPTIMIZER, (30,), "it stood at 31", ranks=(1,))
    samples = Witness(SAMPLES, (30,), "those of its step 1 are those of step 31", ranks=(1,))
    part = Segment(1, 0, 0.0, 35, (Witness(OPTIMIZER, (35,), "it stood at 36", ranks=(0,)), counter, samples))
    told = apart(part)
    assert told is not None
    assert (told.ranks, told.step, told.sure) == ((1,), 30, True)
    assert apart(replace(part, witnesses=(counter, samples))) is None, "no other rank is known to go on from the base"
    for alone in (counter, samples, replace(samples, fits=(30, 35))):
        assert apart(replace(part, witnesses=(alone,))) is None
    assert apart(replace(part, witnesses=(counter, replace(samples, ranks=(0,))))) is None


def test_a_rank_without_steps_may_save_before_the_others_are_done_with_the_step(trainer: Any) -> None:
    """An actor has done its part of the step when the learner still trains: the time of its save does not show that its
    file is of the step before. A file of a much earlier step is told."""
    run = trainer(kills=[(18, 1)]).record()
    saves = (Kind.SAVE_BEGIN, Kind.SAVE_END)
    done = {
        (e.attempt, e.step): e.mono_s
        for e in run.events if e.kind is Kind.STEP and e.rank == 0
    }  # fmt: skip

    def of_actor(event: Event, loaded: int) -> Event:
        step = loaded if event.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) else int(event.data["path"].rpartition("-")[2])
        data = {**event.data, "path": f"/job/checkpoints/actor-{step}"}
        if "numbers" in data:
            data["numbers"] = {"update": step}
        if event.kind not in saves:
            return replace(event, data=data)
        before = done[event.attempt, event.step] - 1e-3 + 1e-4 * saves.index(event.kind)
        return replace(event, data=data, step=0, mono_s=before)

    for loaded, apart_ in ((15, False), (10, True)):
        events = [
            of_actor(e, loaded) if e.rank == 1 and "path" in e.data else e
            for e in run.events if not (e.kind is Kind.STEP and e.rank == 1)
        ]  # fmt: skip
        found = NoLostWork().judge(replace(run, events=tuple(sorted(events, key=lambda e: e.mono_s))), [])
        assert ("rank 1 loaded a checkpoint of step" in found.reason) is apart_, found.reason
        assert (found.outcome is Outcome.PASSED) is not apart_


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["/job/out/ckpt-160.opt.pt", "/job/out/ckpt-160.safetensors"], "ckpt-160.safetensors"),
        (["/job/out/step-8/optim.pt", "/job/out/step-8/model.pt"], "step-8"),
        (["/job/out/last/optim.pt", "/job/out/last/model.pt"], "last"),
    ],
)
def test_a_checkpoint_of_several_files_has_the_name_with_its_step(paths: list[str], name: str) -> None:
    """The folder in which all checkpoints are is not the name of one."""
    saves = [Save(path, "torch", 0, 8, (0,), 1.0, 2.0, True, 1.0, 8) for path in paths]
    assert posixpath.basename(_common(saves)) == name
