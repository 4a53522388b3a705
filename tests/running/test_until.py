"""Runs that are ended on purpose, and faults that wait for the recovery from another fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.analysis.caught_up import SETTLED
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import After
from torchaos.harness.running.conditions.progress import Recovered, after_is_due, new_steps
from torchaos.harness.running.engine.supervision import SHARE, Throttle
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

SCENARIO = """\
scenario: endless
job: {command: "torchrun --nproc-per-node 2 train.py"}
faults:
  - {id: stop, inject: process.freeze, target: {rank: 1}, when: {time: 2s}, for: 3s}
  - {id: kill, inject: process.kill, target: {rank: 0}, when: {after: stop, state: recovered, delay: 1s, time: 20s}}
until: [{recovered: {rest: 5s}}]
twin: none
assert: [recovery_time]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "endless.yaml"
    path.write_text(text)
    return path


def test_the_plan_knows_what_lasts(tmp_path: Path) -> None:
    """What waits for the recovery from a freeze waits for its end too, and no sooner than so long after the launch."""
    path = written(tmp_path, SCENARIO)
    plan = make_plan(load(path), path, 0)
    assert plan.faults[1].trigger == After(1.0, "stop", "recovered", not_before_s=20.0, lasting=True)
    assert plan.until[0].params == {"rest": 5.0, "faults": ["stop", "kill"], "lasting": ["stop"], "lethal": ["kill"]}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("twin: none\n", "", "twin: none"),
        ("assert: [recovery_time]", "assert: [recovery_time, completed]", "remove completed"),
        ("rest: 5s", "rest: 5s, faults: [bang]", "there is no fault 'bang'"),
    ],
)
def test_what_can_not_be_beside_until(tmp_path: Path, old: str, new: str, words: str) -> None:
    """A run without an end of its own has no twin, does not complete, and waits for faults that there are."""
    path = written(tmp_path, SCENARIO.replace(old, new))
    with pytest.raises(UsageError, match=words):
        make_plan(load(path), path, 0)


def test_a_fault_that_lasts_has_to_be_taken_back_first(trainer: Any) -> None:
    """The ranks go on between two beats of a slow-down, which is no recovery from it."""
    run = trainer(freeze=(10, 1, 3.0)).record()
    hit, end = next(run.of_kind(Kind.APPLYING)), run.events[-1].mono_s
    on = [e for e in run.events if e.kind is not Kind.ROLLED_BACK]
    back = Event(Kind.ROLLED_BACK, "harness", 9999, end, end, data={"fault": "freeze", "verified": True, "reason": ""})
    after = After(0.0, hit.data["fault"], "recovered", lasting=True)
    assert after_is_due(replace(after, lasting=False), on, end)
    assert not after_is_due(after, on, end)
    back = replace(back, data={**back.data, "fault": hit.data["fault"]})
    assert after_is_due(after, [*on, back], end)


@pytest.mark.parametrize("fault", [None, "kill"])
def test_a_delay_is_waited_for(trainer: Any, fault: str | None) -> None:
    """`time: 5s` after the launch, or `delay: 5s` after another fault: not at once, and not much later."""
    run = trainer(kills=[(18, 1)]).record()
    of = Kind.JOB_STARTED if fault is None else Kind.APPLYING
    start = next(run.of_kind(of)).mono_s
    after = After(5.0, fault)
    assert not after_is_due(after, run.events, start)
    assert not after_is_due(after, run.events, start + 4.99)
    assert after_is_due(after, run.events, start + 5.0)


def test_felt_is_the_end_of_a_process_that_was_hit(trainer: Any) -> None:
    """Neither the landing itself nor the end of another process is that."""
    run = trainer(kills=[(18, 1)]).record()
    hit = next(run.of_kind(Kind.APPLYING))
    gone = next(e for e in run.of_kind(Kind.RANK_EXITED) if e.data["pid"] == hit.data["pid"])
    before = [e for e in run.events if e.mono_s < gone.mono_s]
    other = replace(gone, data={**gone.data, "pid": 1}, mono_s=gone.mono_s - 0.001)
    earlier = replace(gone, mono_s=hit.mono_s - 0.001)  # the pid of a process that had been there before
    after = After(0.0, "kill", "felt")
    assert not after_is_due(after, [*before, earlier, other], gone.mono_s)
    assert after_is_due(after, [*before, gone], gone.mono_s)


def test_so_many_checkpoints_are_waited_for(trainer: Any) -> None:
    """Saves of rank 0 that worked, since the launch or since the other fault; the delay begins with the last one."""
    run = trainer(kills=[(18, 1)]).record()
    saves = [e.mono_s for e in run.of_kind(Kind.SAVE_END) if e.rank == 0]
    hit_s = next(run.of_kind(Kind.APPLYING)).mono_s
    for fault, nth in ((None, saves[1]), ("kill", [at for at in saves if at > hit_s][1])):
        after = After(0.5, fault, checkpoints=2)
        assert not after_is_due(after, [e for e in run.events if e.mono_s < nth], nth + 9.0)
        assert not after_is_due(after, run.events, nth + 0.499)
        assert after_is_due(after, run.events, nth + 0.5)
    failed = [replace(e, data={**e.data, "ok": False}) if e.kind is Kind.SAVE_END else e for e in run.events]
    others = [e for e in run.events if e.kind is not Kind.SAVE_END or e.rank != 0]
    for events in (failed, others):
        assert not after_is_due(After(0.0, checkpoints=2), events, saves[-1] + 9.0)


def test_no_sooner_than_so_long_after_the_launch(trainer: Any) -> None:
    """Both have to be: the other fault's recovery, and the time."""
    run = trainer(kills=[(18, 1)]).record()
    launch = next(run.of_kind(Kind.JOB_STARTED)).mono_s
    after = After(0.0, "kill", "recovered", not_before_s=1000.0)
    assert not after_is_due(after, run.events, launch + 999.0)
    assert after_is_due(after, run.events, launch + 1000.0)


def test_recovered_is_all_of_them_and_a_rest(trainer: Any) -> None:
    """One fault that was not recovered from, or a rest that is not over, and it does not hold."""
    run = trainer(kills=[(18, 1)]).record()
    end = run.events[-1].mono_s
    assert Recovered(0.0, ["kill"]).holds(run.events, end)
    assert not Recovered(100.0, ["kill"]).holds(run.events, end)
    assert not Recovered(0.0, ["kill", "later"]).holds(run.events, end)


def test_the_history_is_made_once_for_all_faults(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a long run it is the dear part of the answer, and a round has many faults."""
    run, made, of = trainer(kills=[(18, 1)]).record(), [], History.of

    def counted(events: Sequence[Event]) -> History:
        made.append(len(events))
        return of(events)

    monkeypatch.setattr(History, "of", counted)
    assert Recovered(0.0, ["kill"] * 5).holds(run.events, run.events[-1].mono_s)
    assert len(made) == 1


def test_a_costly_question_is_asked_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer that took a second of a processor the next one is due SHARE seconds later, however long that
    second was on a busy machine."""
    now, spent = [100.0], [5.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: spent[0])
    throttle = Throttle()
    assert throttle.due()
    with throttle:
        now[0] += 30.0
        spent[0] += 1.0
    now[0] += SHARE - 0.5
    assert not throttle.due()
    now[0] += 0.5
    assert throttle.due()


def test_what_a_rank_does_before_it_dies_is_no_recovery(trainer: Any) -> None:
    """Under notice it ends its step: that is not beyond the fault. A later attempt has to get past all before."""
    run = trainer(kills=[(20, 1)]).record()
    hit = next(run.of_kind(Kind.APPLYING))
    early = replace(hit, mono_s=next(e.mono_s for e in run.events if e.step == 15) + 0.001, rank=1)
    events = [e for e in run.events if e is not hit] + [early]
    died = max(e.mono_s for e in run.events if e.attempt == 0)
    after = After(0.0, "kill", "recovered")
    assert after_is_due(after, [e for e in events if e.mono_s <= died], died), "it lives on for four steps"
    assert not after_is_due(replace(after, lethal=True), [e for e in events if e.mono_s <= died], died)
    assert after_is_due(replace(after, lethal=True), events, run.events[-1].mono_s)


def test_the_history_is_not_asked_before_a_step_that_could_tell(trainer: Any) -> None:
    """A rank that dies of it is recovered from by a later attempt alone; until that has made a step, nothing dear is
    done, however many steps the dying attempt still made."""
    run = trainer(kills=[(18, 1)]).record()
    asked: list[float] = []

    def history(events: list[Event]) -> History:
        asked.append(events[-1].mono_s)
        return History.of(events)

    after = After(0.0, "kill", "recovered", lethal=True)
    first = min(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 1)
    for now in [e.mono_s for e in run.events]:
        seen = [e for e in run.events if e.mono_s <= now]
        due = after_is_due(after, seen, now, lambda seen=seen: history(seen))  # type: ignore[misc]
        assert due == after_is_due(replace(after, lethal=False), seen, now) or now < first
    assert min(asked) == first
    assert due


def test_a_node_or_a_file_that_was_hit_is_recovered_from(trainer: Any) -> None:
    """Nobody's rank is told of such a fault: any rank that gets further has outlived it."""
    run = trainer().record()
    at = next(e.mono_s for e in run.events if e.step == 10) + 0.0001
    data = {"fault": "cut", "phase": None, "global_step": None, "pid": None, "node": 1}
    hit = Event(Kind.APPLYING, "harness", 9999, 0.0, at, data=data)
    after = After(0.0, "cut", "recovered")
    assert after_is_due(after, [*run.events, hit], run.events[-1].mono_s)
    assert not after_is_due(after, [hit, *(e for e in run.events if e.mono_s <= at)], at + 100.0)


def died_again(trainer: Any) -> list[Event]:
    """Killed in step 18, and back; it dies once more in step 24, of nothing that was done to it, and starts again."""
    run = trainer(kills=[(18, 1), (24, 0)]).record()
    second = list(run.of_kind(Kind.APPLYING))[1]
    return [e for e in run.events if e is not second]


def test_a_job_that_died_again_has_not_recovered(trainer: Any) -> None:
    """It got beyond the fault, and is on its knees when the rest is over: that holds once it is beyond all before, and
    has had its rest then."""
    events = died_again(trainer)
    back = min(e.mono_s for e in events if e.attempt == 2)
    down = [e for e in events if e.mono_s <= back]
    died = next(e.mono_s for e in events if e.kind is Kind.RANK_EXITED and e.attempt == 1)
    assert Recovered(0.0, ["kill"]).holds([e for e in events if e.mono_s < died], died)
    for until_s in (died, back):  # torchrun takes its time to end the others, and to start them again
        assert not Recovered(0.0, ["kill"]).holds([e for e in events if e.mono_s <= until_s], until_s + 0.001)
    assert not Recovered(0.0, ["kill"]).holds(down, back + 100.0)
    again = next(e.mono_s for e in events if e.kind is Kind.STEP and e.attempt == 2 and e.step == 24 - 20)
    assert Recovered(0.0, ["kill"]).holds([e for e in events if e.mono_s <= again], again)
    assert not Recovered(5.0, ["kill"]).holds([e for e in events if e.mono_s <= again], again + 4.0)


def test_all_steps_are_new_after_an_attempt_that_made_none(trainer: Any) -> None:
    """It died in its first step: the next attempt's first step had not been made before."""
    history = trainer(kills=[(1, 1)]).record().history
    assert len(new_steps(history)) == 2 * 30
    assert len(new_steps(trainer(kills=[(18, 1)]).record().history)) == 2 * 13


def test_a_job_that_stands_still_has_no_rest(trainer: Any) -> None:
    """It got beyond the fault, and hangs: however long that is, no step ends after the rest, and without a rest the
    next one is long overdue."""
    run = trainer(kills=[(18, 1)]).record()
    end = max(e.mono_s for e in run.events if e.kind is Kind.STEP)
    still = [e for e in run.events if e.mono_s <= end]
    assert Recovered(0.0, ["kill"]).holds(still, end)
    assert not Recovered(50.0, ["kill"]).holds(still, end + 1000.0)
    assert not Recovered(0.0, ["kill"]).holds(still, end + 1000.0)


def test_recovered_can_hold_where_little_is_seen(trainer: Any) -> None:
    """With no fault there is nothing to wait for, though no step is seen; where nobody can say which steps an attempt
    makes, it is enough that it makes them; a fault that never landed left nothing to recover from."""
    assert Recovered(5.0).holds([], 100.0)
    unplaced = trainer(kills=[(18, 1)], loads_seen=False, counters_seen=False, samples_seen=False, losses_seen=False)
    events = list(unplaced.record().events)
    assert History.of(events).unplaced
    missed = Event(Kind.MISSED, "harness", 9999, 0.0, 1.0, data={"fault": "late", "reason": "its rank was gone"})
    last = max(e.mono_s for e in events if e.kind is Kind.STEP)
    assert Recovered(0.0, ["late"]).holds([missed, *(e for e in events if e.mono_s <= last)], last)


def test_a_step_before_it_dies_of_it_is_no_recovery(trainer: Any) -> None:
    """Frozen late in a step that was ended all the same, after which the job was restarted: what waits for the recovery
    waits until it is beyond all before, as the verdict has it."""
    run = trainer(kills=[(13, 1)]).record()
    at = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 0 and e.step == 12) - 0.0001
    hit = replace(next(run.of_kind(Kind.APPLYING)), mono_s=at)
    events = sorted((*(e for e in run.events if e.kind is not Kind.APPLYING), hit), key=lambda e: e.mono_s)
    back = max(e.mono_s for e in events if e.kind is Kind.AGENT_STARTED)
    after = After(0.0, hit.data["fault"], "recovered")
    assert not after_is_due(after, [e for e in events if e.mono_s <= back], back + 100.0)
    assert after_is_due(after, events, events[-1].mono_s)


def test_a_run_that_goes_on_still_has_to_settle(trainer: Any) -> None:
    """The attempt that was hit may be going under: one more step is no proof of it, a few more are."""
    run = trainer(freeze=(8, 1, 2.0)).record()
    own = [e.mono_s for e in run.events if e.kind is Kind.STEP and e.rank == 1 and (e.step or 0) >= 8]
    after = After(0.0, "freeze", "recovered")
    for number, at in enumerate(own[: SETTLED + 2]):
        assert after_is_due(after, [e for e in run.events if e.mono_s <= at], at) == (number >= SETTLED)
