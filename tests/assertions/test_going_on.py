"""The end of a recovery: not the next step, but the step from which training really continues."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchaos.assertions.recovery_time import RecoveryTime
from torchaos.assertions.restart_tier import RestartTier
from torchaos.harness import registry
from torchaos.harness.analysis.caught_up import Pace, way_back_s
from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.analysis.recovery_times import end_of, recoveries
from torchaos.harness.analysis.verdict import records_of
from torchaos.harness.fault_drivers import node_faults
from torchaos.harness.interfaces import Outcome, Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.conditions.progress import Seen

RUNS = Path(__file__).parents[1] / "data" / "runs"


def lasting(run: Record, *later: tuple[int, float]) -> Record:
    """The record of a freeze that is on until the run ends, with `later` pauses: (step of attempt 0, seconds)."""
    fault = PlannedFault("freeze", "process.freeze", "rank", Target((1,)), After(), {}, "", "", duration_s=600.0)
    return replace(slowed(run, *later), plan=replace(run.plan, faults=(fault,)))


def slowed(run: Record, *pauses: tuple[int, float]) -> Record:
    """All that comes after these steps of attempt 0 comes so many seconds later."""
    for step, seconds in pauses:
        at = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 0 and e.step == step)
        run = replace(run, events=tuple(_moved(e, seconds) if e.mono_s > at else e for e in run.events))
    return run


def _moved(event: Event, seconds: float) -> Event:
    return replace(event, mono_s=event.mono_s + seconds)


def caught_up(run: Record, twins: Sequence[Record] = ()) -> float | None:
    return recoveries(run, twins)[0].parts["caught_up"]


@pytest.mark.parametrize(
    ("name", "least_s"), [("ecc-drained", 3.0), ("xid-drained", 2.5), ("stalled-a-step-later", 4.0)]
)
def test_recorded_faults_that_stop_training_a_step_later(name: str, least_s: float) -> None:
    """Each let one more step through, and then stopped training for seconds: that is no recovery within a second."""
    run, twins = records_of(RunDir(RUNS / name))
    finding = RecoveryTime(catch_up=1.0).judge(run, twins)
    assert finding.outcome is Outcome.FAILED
    assert finding.measured["catch_up"] > least_s
    assert finding.measured["invalid_time"] >= finding.measured["catch_up"]
    tier = "none" if name == "stalled-a-step-later" else "in_place"
    assert RestartTier().judge(run, twins).measured["tier"] == tier


def test_a_halt_while_the_fault_is_on_is_part_of_the_recovery(trainer: Any) -> None:
    """The steps go on for a while under the fault, stop, and go on again: that is when training really went on."""
    run = lasting(trainer(freeze=(8, 1, 0.1)).record(), (12, 6.0))
    assert caught_up(run) == pytest.approx(6.5, abs=0.5)
    assert caught_up(lasting(trainer(freeze=(8, 1, 0.1)).record())) == pytest.approx(0.1, abs=0.1)


def test_a_halt_long_after_a_fault_that_is_over_is_not(trainer: Any) -> None:
    """Of a fault that was taken back long before, a pause says nothing."""
    run = lasting(trainer(freeze=(8, 1, 0.1)).record(), (22, 6.0))
    back_s = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.step == 10)
    data = {"fault": "freeze", "verified": True, "reason": ""}
    back = Event(Kind.ROLLED_BACK, "harness", 9_999, 0.0, back_s, data=data)
    over = replace(run, events=tuple(sorted((*run.events, back), key=lambda e: e.mono_s)))
    assert (caught_up(run) or 0.0) > 6.0
    assert caught_up(over) == pytest.approx(0.1, abs=0.1)


def test_a_halt_is_longer_than_all_that_is_usual() -> None:
    """Than ten usual steps, than a second, and than three of the job's own pauses: near that step, where there are."""
    slow, quick = Pace(0.5, {7: 3.0}, 0.6), Pace(0.01, {}, 0.01)
    assert [slow.is_halt(took_s, None) for took_s in (4.9, 5.1)] == [False, True]
    assert [slow.is_halt(took_s, 8) for took_s in (8.9, 9.1)] == [False, True]
    assert [slow.is_halt(took_s, 9) for took_s in (4.9, 5.1)] == [False, True]
    assert [quick.is_halt(took_s, None) for took_s in (0.9, 1.1)] == [False, True]


def test_a_pause_that_is_usual_is_no_halt(trainer: Any) -> None:
    """A checkpoint or an evaluation takes long in this job: in the twin at the same step, or in the run before."""
    fault, late = trainer(freeze=(8, 1, 0.1)).record(), (12, 6.0)
    assert caught_up(lasting(fault, late), [slowed(trainer().record(), (12, 5.0))]) == pytest.approx(0.1, abs=0.1)
    assert caught_up(lasting(fault, (4, 5.0), late)) == pytest.approx(0.1, abs=0.1)
    elsewhere = slowed(trainer().record(), (25, 5.0))
    assert (caught_up(lasting(fault, late), [elsewhere]) or 0.0) > 6.0


def test_a_job_that_hangs_a_step_later_never_went_on(trainer: Any) -> None:
    """A few more steps, and then none until the run was ended: that is no recovery."""
    run = lasting(trainer(freeze=(8, 1, 0.1)).record())
    last_s = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.step == 11)
    hung = [e for e in run.events if e.mono_s <= last_s]
    stop = Event(Kind.STOPPED, "harness", 9_999, 0.0, hung[-1].mono_s + 60.0, data={"reason": "it took too long"})
    assert caught_up(replace(run, events=(*hung, stop))) is None
    finding = RecoveryTime().judge(replace(run, events=(*hung, stop)), [])
    assert (finding.outcome, "made no further step after step 11" in finding.reason) == (Outcome.FAILED, True)
    soon = replace(stop, mono_s=hung[-1].mono_s + 0.5)
    assert caught_up(replace(run, events=(*hung, soon))) == pytest.approx(0.1, abs=0.1)


def test_a_restart_that_another_fault_explains_is_its_own(trainer: Any) -> None:
    """A kill in the same attempt is why it ended, so the freeze before it was over when the steps went on."""
    explained = trainer(freeze=(8, 1, 2.0), kills=[(18, 1)]).record()
    freeze, _kill = recoveries(explained)
    assert freeze.parts["caught_up"] == pytest.approx(2.0, abs=0.1)
    alone = replace(explained, events=tuple(e for e in explained.events if e.data.get("fault") != "kill"))
    (freeze,) = recoveries(alone)
    assert (freeze.parts["caught_up"] or 0.0) > 3.0
    assert freeze.lost_steps == 2


def test_an_abort_on_the_way_out_is_no_sign_that_it_went_under(trainer: Any) -> None:
    """The job was done, aborted at interpreter exit and was started again: the fault had been over long before."""
    run = trainer(freeze=(8, 1, 2.0)).record()
    aborted = tuple(
        replace(e, data={**e.data, "exit_code": -6}) if e.kind is Kind.RANK_EXITED and e.rank == 1 else e
        for e in run.events
    )
    up = next(e for e in run.events if e.kind is Kind.RANK_UP and e.rank == 0)
    again = replace(up, attempt=1, mono_s=run.events[-1].mono_s + 1.0, data={**up.data, "pid": 1010})
    assert caught_up(replace(run, events=(*aborted, again))) == pytest.approx(2.0, abs=0.1)
    assert caught_up(replace(run, events=(*run.events, again))) is None


def killed_in_the_last_save(trainer: Any, made_good: bool, **artifacts: Any) -> Record:
    """Rank 1 dies while the checkpoint of step 30, the last one, is written; the next attempt resumes from step 25 and
    writes it, or takes the job for done and ends with exit code 0."""
    run: Record = trainer(kills=[(30, 1)]).record(**artifacts)
    hit = next(run.of_kind(Kind.APPLYING))
    model = [e for e in run.events if e.kind is Kind.STEP and e.attempt == 0][-2:]
    begun = next(e for e in run.of_kind(Kind.SAVE_BEGIN) if e.rank == 1)
    more = [replace(e, step=30, mono_s=hit.mono_s - 0.002, data={**e.data, "opt_step": 30}) for e in model]
    path = {"path": "/job/checkpoints/step-30", "format": "dcp"}
    more.append(replace(begun, step=30, mono_s=hit.mono_s - 0.001, data=path))
    own = [e for e in run.events if made_good or e.attempt != 1 or e.kind not in (Kind.STEP, *_TRANSFERS)]
    return replace(run, events=tuple(sorted((*own, *more), key=lambda e: e.mono_s)))


_TRANSFERS = (Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_END)


def test_after_the_last_step_the_last_save_counts(trainer: Any) -> None:
    """There is no step to get past: the job has recovered when what it was saving is whole, and not before."""
    twin = trainer().record()
    run = killed_in_the_last_save(trainer, made_good=True)
    saved_s = max(e.mono_s for e in run.events if e.kind is Kind.SAVE_END)
    (one,) = recoveries(run, [twin])
    hit_s = next(run.of_kind(Kind.APPLYING)).mono_s
    assert one.parts["caught_up"] == pytest.approx(saved_s - hit_s)
    assert one.lost_steps == 5
    assert RecoveryTime().judge(run, [twin]).outcome is Outcome.PASSED


@pytest.mark.parametrize(("names", "outcome"), [("ab", Outcome.INCONCLUSIVE), ("a", Outcome.FAILED)])
def test_a_last_save_that_nobody_made_good(trainer: Any, names: str, outcome: Outcome) -> None:
    """It counts as lost where the inventory shows that something is missing in it; else the job may have been done."""

    def inventory(names: str) -> dict[str, Any]:
        good = {"path": "step-30", "format": "dcp", "step": 30, "complete": True, "loadable": True, "problem": None}
        return {
            "root": "/job",
            "checkpoints": [{**good, "tensors": dict.fromkeys(names, "0"), "values": {}, "bytes": 1}],
        }

    twin = trainer().record(inventory=inventory("ab"))
    run = killed_in_the_last_save(trainer, made_good=False, inventory=inventory(names))
    finding = RecoveryTime().judge(run, [twin])
    assert finding.outcome is outcome, finding.reason
    assert "after" in finding.reason
    unseen = RecoveryTime().judge(killed_in_the_last_save(trainer, made_good=False), [twin])
    assert (unseen.outcome, "nothing shows whether" in unseen.reason) == (Outcome.INCONCLUSIVE, True)


def _grown(trainer: Any, *backs: tuple[int, str], hits: tuple[str, ...] = ("kill",), kills: Any = None) -> Record:
    """A node dies in step 18, and the job shrinks to two ranks; attempt 1 ends in step 25, and the next one has three
    ranks again. `backs`: after which step of attempt 1 which fault's node is back; `hits`: what hit attempt 0."""
    run: Record = trainer(world=3, kills=kills or [(18, 1), (25, 1)], worlds={0: 3, 1: 2}).record()
    kill = next(run.of_kind(Kind.APPLYING))
    own = [e for e in run.events if e.kind is not Kind.APPLYING]
    own += [replace(kill, data={**kill.data, "fault": fault}) for fault in hits]
    ends = {e.step: e.mono_s for e in run.of_kind(Kind.STEP) if e.attempt == 1}
    for step, fault in backs:
        data = {"fault": fault, "effect": "node 1 is back", "what": "back"}
        own.append(Event(Kind.EFFECT, "harness", 9_000 + len(own), 0.0, ends[step] + 0.001, data=data))
    faults = tuple(
        PlannedFault(fault, "node.reboot", "node", Target((1,)), After(), {}, "", "") for fault in dict.fromkeys(hits)
    )
    own.sort(key=lambda e: e.mono_s)
    return replace(run, events=tuple(own), plan=replace(run.plan, faults=faults))


def _went_on_in(run: Record) -> list[int | None]:
    """The attempt in which training went on, of each landing."""
    ends = [end_of(run, landing) for landing in landings(run)]
    return [end.attempt if end else None for end in ends]


def test_a_node_that_comes_back_interrupts_again(trainer: Any) -> None:
    """The job shrinks, and grows with another restart when the node is back: that one is of the recovery too."""
    run = _grown(trainer, (4, "kill"))
    assert _went_on_in(run) == [2]
    (one,) = recoveries(run)
    last = max(e.mono_s for e in run.of_kind(Kind.STEP) if e.attempt == 1)
    hit_s = next(run.of_kind(Kind.APPLYING)).mono_s
    assert (one.parts["caught_up"] or 0.0) > last - hit_s
    assert one.lost_steps == 6  # 17 to 15, and 24 to 20
    assert _went_on_in(_grown(trainer)) == [1]  # nothing came back: nobody knows why it grew


def test_a_restart_of_a_later_attempt_is_no_part_without_growth(trainer: Any) -> None:
    """What crashes after the node is back crashes by itself."""
    run = _grown(trainer, (1, "kill"))
    assert _went_on_in(run) == [2]
    same = tuple(
        replace(e, data={**e.data, "world_size": 2}) if e.attempt == 2 and "world_size" in e.data else e
        for e in run.events if e.attempt != 2 or e.rank != 2
    )  # fmt: skip
    assert _went_on_in(replace(run, events=same)) == [1]


def test_one_restart_is_of_one_way_back(trainer: Any) -> None:
    """Two nodes die at once and one restart takes in both; a restart that another landing explains is that one's."""
    both = _grown(trainer, (3, "kill"), (4, "other"), hits=("kill", "other"))
    assert sorted(one or 0 for one in _went_on_in(both)) == [1, 2]
    run = _grown(trainer, (4, "kill"))
    hit = next(run.of_kind(Kind.APPLYING))
    late_s = max(e.mono_s for e in run.of_kind(Kind.STEP) if e.attempt == 1)
    data = {**hit.data, "fault": "other", "pid": 1011}
    other = replace(hit, attempt=1, mono_s=late_s + 0.0001, data=data)
    explained = replace(run, events=tuple(sorted((*run.events, other), key=lambda e: e.mono_s)))
    assert _went_on_in(explained) == [1, 2]


def test_a_reboot_tells_when_its_node_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its effect is the way back that a recovery looks for; that of the kill is none."""
    told: list[Event] = []

    def emit(kind: Kind, data: dict[str, Any]) -> None:
        told.append(Event(kind, "harness", len(told), 0.0, 10.0 + len(told), data=data))

    node = SimpleNamespace(node=SimpleNamespace(index=2), keep_place=lambda: None, start_again=lambda: 7)
    site = SimpleNamespace(fault="f", nodes=(node,), emit=emit, release=lambda: None)
    reboot = registry.find("injectors", "node.reboot")
    monkeypatch.setattr(sys.modules[reboot.__module__], "kill", lambda site: node_faults.tell(site, [5], "killed"))
    reboot(away=0.0).apply(site)
    run = Seen(tuple(told), History.of(told))
    landing = Landing("f", 9.0, 0, frozenset(), frozenset())
    assert way_back_s(run, landing, Kind.EFFECT) == 11.0


def test_a_job_that_died_in_its_last_save_has_recovered_when_its_last_step_is_done_again(trainer: Any) -> None:
    """All steps were done while the fault was on, which then broke the last save: no step is left to get past."""
    made = trainer(steps=31, every=20, freeze=(25, 1, 0.1), kills=[(31, 1)]).record()
    kept = [e for e in made.events if not (e.kind is Kind.STEP and e.attempt == 1 and e.step == 11)]
    run = lasting(replace(made, events=tuple(e for e in kept if e.data.get("fault") != "kill")))
    twin = trainer(steps=30, every=20).record()
    again_s = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 1)
    hit_s = next(e.mono_s for e in run.events if e.kind is Kind.APPLYING)
    assert caught_up(run, [twin]) == pytest.approx(again_s - hit_s, abs=0.1)
    assert caught_up(run, [trainer(steps=31, every=20).record()]) is None


def test_a_halt_right_after_the_job_came_back_is_part_of_the_recovery(trainer: Any) -> None:
    """The job catches up, makes two steps more and stands still for six seconds: it is not back before it goes on."""
    run = trainer(kills=[(13, 1)]).record()
    caught = caught_up(run)
    assert caught is not None
    for step, part_of_it in ((5, True), (15, False)):  # steps 15 and 25 of the job: it catches up with step 13
        at_s = max(e.mono_s for e in run.events if e.kind is Kind.STEP and e.attempt == 1 and e.step == step)
        late = replace(run, events=tuple(_moved(e, 6.0) if e.mono_s > at_s else e for e in run.events))
        later = caught_up(late)
        assert later is not None
        assert (later > caught + 5.0) == part_of_it


def test_a_fault_in_a_process_ends_with_it(trainer: Any) -> None:
    """A rank that was hit died, and came back without the fault, long before the fault's time was over. A fault of the
    machine stays; so does one whose process nobody saw end, or which the job did not outlive."""
    run = trainer(kills=[(18, 1)]).record()
    hit = next(run.of_kind(Kind.APPLYING))
    back = Event(Kind.ROLLED_BACK, "harness", 9_999, 0.0, hit.mono_s + 1.5, data={"fault": "kill", "verified": True})
    events = tuple(sorted((*run.events, back), key=lambda e: e.mono_s))

    def lasted(inject: str, where: Any, events: Sequence[Event] = events) -> float | None:
        fault = PlannedFault("kill", inject, where, Target((1,)), After(), {}, "", "", duration_s=20.0)
        told = replace(run, plan=replace(run.plan, faults=(fault,)), events=tuple(events))
        return recoveries(told)[0].lasted_s

    assert lasted("numeric.scaled_gradient", "rank") == pytest.approx(0.002)
    assert lasted("process.freeze", "node") == pytest.approx(0.002)
    assert lasted("gpu.xid", "node") == pytest.approx(1.5)
    unseen = [e for e in events if not (e.kind is Kind.RANK_EXITED and e.rank == 1)]
    assert lasted("numeric.scaled_gradient", "rank", unseen) == pytest.approx(1.5)
    ended_s = next(e.mono_s for e in events if e.kind is Kind.RANK_EXITED)
    alone = [e for e in events if e.mono_s <= ended_s + 0.5 and e.attempt != 1 and e.kind is not Kind.ROLLED_BACK]
    assert lasted("numeric.scaled_gradient", "rank", alone) is None


def test_a_fault_that_takes_effect_later_is_not_outlived_before(trainer: Any) -> None:
    """Applied in step 8, it changes the first number in step 10: the step after that is the first that outlived it.
    What the harness saw late took effect when it was applied."""
    run = trainer(freeze=(8, 1, 0.0)).record()
    ends = {e.step: e.mono_s for e in run.of_kind(Kind.STEP) if e.rank == 1}
    hit = next(run.of_kind(Kind.APPLYING))
    for rank, over in ((1, 10), (None, 8)):
        attempt = None if rank is None else 0
        data = {"fault": "freeze", "effect": "gradients are those of an earlier step"}
        felt = Event(Kind.EFFECT, "any", 9_000, 0.0, ends[9] + 1e-4, rank, attempt, 10, data)
        told = replace(run, events=tuple(sorted((*run.events, felt), key=lambda e: e.mono_s)))
        assert caught_up(told) == pytest.approx(ends[over] - hit.mono_s)
    last = Event(Kind.EFFECT, "any", 9_000, 0.0, max(ends.values()) + 1e-4, 1, 0, 30, data)
    told = replace(run, events=tuple(sorted((*run.events, last), key=lambda e: e.mono_s)))
    assert caught_up(told) == pytest.approx(max(ends.values()) - hit.mono_s)
