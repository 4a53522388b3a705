"""health_reaction and checkpoint_triggered: what a job does between a GPU's error and its own end."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

from torchaos.assertions.checkpoint_triggered import CheckpointTriggered
from torchaos.assertions.health_reaction import HealthReaction
from torchaos.harness import registry
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome, Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.record import Record
from torchaos.injectors.gpu_reports import Xid

FAULT = PlannedFault("xid", "gpu.xid", "node", Target((1,)), Moment(1, 16, None), {}, "", "Xid")


def sick(trainer: Any, noticed: bool = True, saved: int | None = 17, whole: bool = True, leaves: bool = True) -> Record:
    """GPU 1 has an Xid in step 16; a checkpoint of step `saved` is taken, and both ranks leave in step 18."""
    run: Record = trainer(every=7, kills=[(18, 1)] if leaves else []).record()
    at = {s: max(e.mono_s for e in run.history.executions if (e.global_step, e.attempt) == (s, 0)) for s in (15, 17)}
    hit = {"fault": "xid", "phase": None, "global_step": 16, "pid": 1001}
    events = [Event(Kind.APPLYING, "harness", 80_000, 0.0, at[15] + 1e-3, 1, 0, None, hit)]
    if noticed:
        served = {"fault": "xid", "effect": "gpu1.xid = 79", "served_to": 77, "served_mono_s": at[15] + 3e-3}
        events.append(Event(Kind.EFFECT, "harness", 80_001, 0.0, at[15] + 0.05, None, None, None, served))
    if saved:
        path = {"path": f"/job/checkpoints/step-{saved}", "format": "dcp"}
        end = {**path, "ok": True, "blocked_s": 0.001}
        for rank in range(2):
            events.append(Event(Kind.SAVE_BEGIN, f"rank{rank}-a0", 81_000, 0.0, at[17] + 1e-4, rank, 0, 17, path))
            if whole:
                events.append(Event(Kind.SAVE_END, f"rank{rank}-a0", 81_001, 0.0, at[17] + 2e-4, rank, 0, 17, end))
    kept = [event for event in run.events if event.kind is not Kind.APPLYING]
    plan = replace(run.plan, faults=(FAULT,))
    return Record(plan, tuple(sorted((*kept, *events), key=lambda e: e.mono_s)), {})


def test_a_reaction_in_time_passes_and_a_late_one_fails(trainer: Any) -> None:
    """Noticed, checkpointed and drained, each with its own bound, in seconds since the fault."""
    assert isinstance(HealthReaction(), Assertion)
    run = sick(trainer)
    finding = HealthReaction(noticed=1.0, checkpointed=5.0, drained=10.0).judge(run, [])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured["noticed"] == 0.002
    late = HealthReaction(checkpointed=0.001).judge(run, [])
    assert late.outcome is Outcome.FAILED
    assert "more than allowed" in late.reason


def test_a_part_that_never_came_fails_and_a_fault_that_nobody_read_is_inconclusive(trainer: Any) -> None:
    """Whoever was told and did nothing has failed; where nobody asked there is nothing to judge."""
    stays = HealthReaction(drained=60.0).judge(sick(trainer, leaves=False), [])
    assert stays.outcome is Outcome.FAILED, stays.reason
    unsaved = HealthReaction(checkpointed=0.02).judge(sick(trainer, saved=None, leaves=False), [])
    assert unsaved.outcome is Outcome.FAILED, unsaved.reason
    deaf = HealthReaction(noticed=1.0).judge(sick(trainer, noticed=False), [])
    assert deaf.outcome is Outcome.INCONCLUSIVE
    nobody = HealthReaction(drained=60.0).judge(sick(trainer, noticed=False, leaves=False), [])
    assert nobody.outcome is Outcome.INCONCLUSIVE
    in_the_log = HealthReaction(drained=60.0).judge(sick(trainer, noticed=False), [])
    assert in_the_log.outcome is Outcome.PASSED, "a rank that left was told by somebody, such as a reader of the log"
    assert HealthReaction().judge(trainer(kills=[(18, 1)]).record(), []).outcome is Outcome.INCONCLUSIVE


def test_a_rank_that_is_back_on_the_same_gpu_was_not_excluded(trainer: Any) -> None:
    """After the restart rank 1 is there again."""
    finding = HealthReaction(excluded=True).judge(sick(trainer), [])
    assert finding.outcome is Outcome.FAILED
    assert "rank 1 was started on the same GPU again" in finding.reason


def moved(run: Record, places: dict[tuple[int, int], tuple[int, int]]) -> Record:
    """The same run with ranks on other nodes: (attempt, rank) to (node, local rank)."""

    def at(event: Event) -> Event:
        if event.kind is not Kind.RANK_UP or (event.attempt or 0, event.rank or 0) not in places:
            return event
        node, local = places[event.attempt or 0, event.rank or 0]
        return replace(event, data={**event.data, "node": node, "local_rank": local, "gpu": local})

    return replace(run, events=tuple(map(at, run.events)))


NODES = {(0, 0): (0, 0), (0, 1): (1, 0), (1, 0): (0, 0)}


def test_a_rank_that_moved_to_another_node_left_the_gpu(trainer: Any) -> None:
    """After the restart rank 1 runs on the standby node 2: the sick GPU of node 1 was excluded."""
    finding = HealthReaction(excluded=True).judge(moved(sick(trainer), {**NODES, (1, 1): (2, 0)}), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_the_sick_gpu_under_another_rank_was_not_excluded(trainer: Any) -> None:
    """The ranks change places: rank 0 now runs where rank 1 was hit. So does a rank that sees that GPU by another
    local number."""
    swapped = HealthReaction(excluded=True).judge(moved(sick(trainer), {**NODES, (1, 0): (1, 0), (1, 1): (0, 0)}), [])
    assert swapped.outcome is Outcome.FAILED, swapped.reason
    assert "rank 0 was started on the same GPU again" in swapped.reason


def test_a_rank_on_a_gpu_that_is_not_known_may_be_on_the_sick_one(trainer: Any) -> None:
    """After the restart rank 1 is on the same node, and its environment does not show which GPU it uses."""
    run = moved(sick(trainer), {(1, 1): (0, 2)})
    ups = [replace(e, data={**e.data, "gpu": None}) if _is_up(e, 1, 1) else e for e in run.events]
    finding = HealthReaction(excluded=True).judge(replace(run, events=tuple(ups)), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "it is not known which GPU rank 1 uses in attempt 1" in finding.reason


def _is_up(event: Event, attempt: int, rank: int) -> bool:
    return event.kind is Kind.RANK_UP and (event.attempt, event.rank) == (attempt, rank)


def test_a_gpu_that_the_scenario_names_is_the_one_that_counts(trainer: Any) -> None:
    """`gpu: 0` of rank 1's node: rank 0 comes back to it, rank 1 does not."""
    run = moved(sick(trainer), {(1, 1): (0, 2)})
    named = replace(FAULT, params={"gpu": 0})
    assert HealthReaction(excluded=True).judge(run, []).outcome is Outcome.PASSED
    finding = HealthReaction(excluded=True).judge(replace(run, plan=replace(run.plan, faults=(named,))), [])
    assert "rank 0 was started on the same GPU again" in finding.reason


def test_the_gpu_of_a_standby(trainer: Any) -> None:
    """No rank was on it, so none had to leave; a rank that comes to it is on a sick GPU."""
    run = sick(trainer)
    fault = replace(FAULT, params={"gpu": 0}, target=Target((), (2,)))
    events = [
        replace(e, rank=None, data={**e.data, "pid": 4}) if e.kind is Kind.APPLYING and e.data["fault"] == "xid" else e
        for e in moved(run, NODES).events
    ]
    run = replace(run, events=tuple(events), plan=replace(run.plan, faults=(fault,)))
    spared = HealthReaction(drained=1.0, excluded=True).judge(moved(run, {(1, 1): (1, 0)}), [])
    assert (spared.outcome, spared.measured["drained"]) == (Outcome.PASSED, 0.0), spared.reason
    joined = HealthReaction(excluded=True).judge(moved(run, {(1, 1): (2, 0)}), [])
    assert joined.outcome is Outcome.FAILED
    assert "rank 1 was started on the same GPU again" in joined.reason


def test_a_fault_of_another_package_that_says_what_it_is_about(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name begins with its maker's; `family` says that it is one of a GPU's health."""
    run = sick(trainer)
    theirs = replace(run, plan=replace(run.plan, faults=(replace(FAULT, inject="acme.bad_gpu"),)))
    assert HealthReaction().judge(theirs, []).outcome is Outcome.INCONCLUSIVE
    entry = EntryPoint("acme.bad_gpu", f"{__name__}:Theirs", "torchaos.injectors")
    ours = registry._entries("injectors")
    monkeypatch.setattr(registry, "_entries", lambda group: (*ours, entry))
    assert HealthReaction().judge(theirs, []).outcome is Outcome.PASSED
    assert CheckpointTriggered().judge(theirs, [trainer(every=7).record()]).outcome is Outcome.PASSED


class Theirs(Xid):
    name: ClassVar[str] = "acme.bad_gpu"
    family: ClassVar[str] = "gpu"


def test_a_checkpoint_between_sign_and_death_passes_where_none_was_due(trainer: Any) -> None:
    """Step 17 is none of the twin's, so it was triggered; without a twin that can't be told."""
    assert isinstance(CheckpointTriggered(), Assertion)
    twin = trainer(every=7).record()
    finding = CheckpointTriggered().judge(sick(trainer), [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured["step"] == 17
    assert CheckpointTriggered().judge(sick(trainer), []).outcome is Outcome.INCONCLUSIVE


def test_no_checkpoint_or_half_a_one_before_the_death_fails(trainer: Any) -> None:
    """One that was begun and never whole helps nobody."""
    twin = trainer(every=7).record()
    assert "none begun" in CheckpointTriggered().judge(sick(trainer, saved=None), [twin]).reason
    half = CheckpointTriggered().judge(sick(trainer, whole=False), [twin])
    assert half.outcome is Outcome.FAILED
    assert "1 were begun, and none was whole" in half.reason


def test_a_regular_checkpoint_and_a_job_that_lives_show_nothing(trainer: Any) -> None:
    """A save at a step at which the twin saves too may have been due anyway; without a death there is no before."""
    often = trainer(every=17).record()
    regular = CheckpointTriggered().judge(sick(trainer), [often])
    assert regular.outcome is Outcome.INCONCLUSIVE
    assert "the twin has it too" in regular.reason
    assert CheckpointTriggered().judge(sick(trainer, leaves=False), [often]).outcome is Outcome.INCONCLUSIVE
    assert CheckpointTriggered(sign="other").judge(sick(trainer), [often]).outcome is Outcome.INCONCLUSIVE


def test_several_regular_checkpoints_are_no_triggered_one(trainer: Any) -> None:
    """A job that goes on with its regular checkpoints until it is ended has not heeded the sign."""
    run, often = sick(trainer), trainer(every=1).record()
    first = next(e for e in run.events if e.kind is Kind.SAVE_BEGIN and e.mono_s >= landings(run)[0].at_s)
    ended = next(e for e in run.events if e.kind is Kind.SAVE_END and e.mono_s >= first.mono_s)
    more = [
        replace(
            e, mono_s=e.mono_s + 1e-4, step=(e.step or 0) - 1, seq=e.seq + 5_000, data={**e.data, "path": "/job/other"}
        )
        for e in (first, ended)
    ]
    both = replace(run, events=tuple(sorted((*run.events, *more), key=lambda e: e.mono_s)))
    finding = CheckpointTriggered().judge(both, [often])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "are regular" in finding.reason
