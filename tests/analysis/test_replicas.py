"""Jobs of replicas: the ranks, restarts and faults of each replica, and what can be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness.agent import startup
from torchaos.harness.analysis.comparison.agreement import wants_more
from torchaos.harness.analysis.replica_verdict import judged
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.interfaces import Outcome, Target, UsageError
from torchaos.harness.monitoring.probes.process_tree import Identity
from torchaos.harness.protocol import wire
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.plan import Named, Plan, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict
from torchaos.harness.registry import find
from torchaos.harness.reporting.event_timeline import happened
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

WHEN = Moment(1, 18, Phase.BACKWARD)
KILL = PlannedFault("kill", "process.kill", "rank", Target((1,)), WHEN, {}, "", "")
COMMANDS = {Kind.JOB_STARTED: Kind.NODE_STARTED, Kind.JOB_EXITED: Kind.NODE_EXITED}


def side_by_side(*parts: Record) -> Record:
    """The journal of a job whose replicas did this, each with one rank."""
    events = []
    for number, part in enumerate(parts):
        for one in part.events:
            data = {**one.data, "node": number} if one.kind in COMMANDS else one.data
            data = {**data, "replica": number} if one.kind is Kind.ELASTIC_RENDEZVOUS else data
            kind, rank = COMMANDS.get(one.kind, one.kind), None if one.rank is None else number + one.rank
            source = f"{one.source} of {number}"
            events.append(replace(one, kind=kind, rank=rank, data=data, source=source))
            if one.kind in COMMANDS:  # the job's own
                events.append(replace(one, source=f"{source}, the job"))
    job = replace(parts[0].plan.job, world_size=len(parts), nodes=len(parts), replicas=len(parts))
    plan = replace(parts[0].plan, job=job, faults=(KILL,))
    return Record(plan, tuple(sorted(events, key=lambda event: event.mono_s)), {})


def went_on(trainer: Any) -> Record:
    """A replica that nothing happened to."""
    return quiet(trainer(world=1, state_seen=True, loads_seen=False).record())


def healed(trainer: Any, at: int = 20, **other: Any) -> Record:
    """One that is killed in step 18 and comes back when the others have done `at` steps, with their state."""
    whole = quiet(trainer(world=1, state_seen=True, **other).record())
    died = next(one for one in whole.events if one.kind is Kind.STEP and one.step == 18)
    back = next(one for one in whole.events if one.kind is Kind.STEP and one.step == at + 1)
    start = next(one for one in whole.events if one.kind is Kind.RANK_UP)
    told = {"pid": start.data["pid"], "start_ticks": 0}
    hit = {"fault": "kill", "phase": "backward", "global_step": 18, "pid": told["pid"]}
    kept = [
        replace(died, kind=Kind.APPLYING, data=hit, mono_s=died.mono_s - 0.004),
        replace(died, kind=Kind.RANK_EXITED, data={**told, "exit_code": -9}, mono_s=died.mono_s - 0.003),
        replace(died, kind=Kind.ELASTIC_FAILURE, data={**told, "exit_code": -9, "local_rank": 0},
                mono_s=died.mono_s - 0.002),
        replace(start, data={**start.data, "pid": 77}, attempt=1, mono_s=back.mono_s - 0.002),
    ]  # fmt: skip
    for one in whole.events:
        if one.mono_s < died.mono_s - 0.004 or one.attempt is None:
            kept.append(one)
        elif one.kind is Kind.STEP and (one.step or 0) > at:
            kept.append(replace(one, attempt=1, step=(one.step or 0) - at, source="rank0-a1"))
        elif one.kind is Kind.RANK_EXITED:
            kept.append(replace(one, attempt=1, data={**one.data, "pid": 77}))
    return replace(whole, events=tuple(sorted(kept, key=lambda event: event.mono_s)))


def quiet(record: Record) -> Record:
    """Without checkpoints."""
    saves = (Kind.SAVE_BEGIN, Kind.SAVE_END)
    return replace(record, events=tuple(one for one in record.events if one.kind not in saves))


def said(name: str, run: Record, twins: Sequence[Record] = (), **bounds: Any) -> tuple[Outcome, str]:
    finding = judged(find("assertions", name)(**bounds), run, twins)
    return finding.outcome, finding.reason


def test_a_replicas_part_is_the_record_of_an_ordinary_job(trainer: Any) -> None:
    """What two replicas did side by side is taken apart again: ranks, commands, restarts and faults are each one's."""
    first, second = went_on(trainer), healed(trainer)
    parts = side_by_side(first, second).of_replicas
    for part, was in zip(parts, (first, second), strict=True):
        assert [(one.kind, one.rank, one.attempt, one.step) for one in part.events] == [
            (one.kind, one.rank, one.attempt, one.step) for one in was.events
        ]
    assert [len(part.plan.faults) for part in parts] == [0, 1]
    assert parts[1].plan.faults[0].target == Target((0,))
    assert parts[1].plan.faults[0].trigger == replace(WHEN, pacer=0)
    assert [len(part.history.attempts) for part in parts] == [1, 2]
    assert parts[1].history.attempts[1].base == 20


def test_a_job_without_replicas_is_its_own_only_part(trainer: Any) -> None:
    """Nothing is copied or renumbered where there is one torchrun."""
    run = trainer(kills=[(18, 1)]).record()
    assert len(run.of_replicas) == 1
    assert run.of_replicas[0] is run


def test_what_holds_of_a_replica_that_was_healed(trainer: Any) -> None:
    """One of two dies, the other goes on alone, and gives it its state when it is back: what can be judged passes."""
    run, twin = side_by_side(went_on(trainer), healed(trainer)), side_by_side(went_on(trainer), went_on(trainer))
    assert said("recovery_time", run, [twin])[0] is Outcome.PASSED
    assert said("completed", run, [twin])[0] is Outcome.PASSED
    assert said("restarts", run, [twin])[0] is Outcome.PASSED
    assert said("lr_continuity", run, [twin])[0] is Outcome.PASSED
    outcome, reason = said("no_lost_work", run, [twin])
    assert (outcome, "went on from step 20, beside a replica" in reason) == (Outcome.PASSED, True), reason
    outcome, reason = said("parameter_digest", run, [twin], replicas_only=True)
    assert (outcome, "equal after each of 27 steps" in reason) == (Outcome.PASSED, True), reason
    assert reason.endswith("by what number the others divided their gradients meanwhile is not judged")
    outcome, reason = said("parameter_digest", twin, [twin], replicas_only=True)
    assert (outcome, "divided" in reason) == (Outcome.PASSED, False), reason


def test_what_can_not_be_told_of_replicas_is_inconclusive(trainer: Any) -> None:
    """Steps that one replica made alone are not the twin's, and an assertion that knows no replicas says so."""
    run, twin = side_by_side(went_on(trainer), healed(trainer)), side_by_side(went_on(trainer), went_on(trainer))
    gone = "3 steps (18 to 20) were made without replica 1"
    for name in ("loss_continuity", "parameter_digest", "sample_accounting"):
        outcome, reason = said(name, run, [twin])
        assert (outcome, gone in reason) == (Outcome.INCONCLUSIVE, True), reason
        assert ("divided their gradients meanwhile is not judged" in reason) is (name != "sample_accounting")
    assert "nobody consumed its 12 samples" in said("sample_accounting", run, [twin])[1]
    outcome, reason = said("checkpoint_integrity", run, [twin])
    assert (outcome, "not a job of 2 replicas" in reason) == (Outcome.INCONCLUSIVE, True)


def of_the_other(data: Mapping[str, Any]) -> dict[str, Any]:
    """The samples that the second replica has in a step in which the first has these."""
    rows = [1000 + index for index in data["indices"]]
    return {"samples": [f"d{row}" for row in rows], "indices": rows}


def second(run: Record) -> Record:
    return replace(run, events=tuple(
        replace(one, data={**one.data, **of_the_other(one.data)}) if one.kind is Kind.STEP else one
        for one in run.events
    ))  # fmt: skip


def taken_over(run: Record) -> Record:
    """A replica that consumes in steps 18 to 20 what the other should have consumed, too."""

    def both(data: Mapping[str, Any]) -> dict[str, Any]:
        return {**data, **{name: [*data[name], *more] for name, more in of_the_other(data).items()}}

    return replace(run, events=tuple(
        replace(one, data=both(one.data)) if one.kind is Kind.STEP and 18 <= (one.step or 0) <= 20 else one
        for one in run.events
    ))  # fmt: skip


def test_replicas_that_take_over_the_samples_of_another_are_judged_as_one_job(trainer: Any) -> None:
    """The global batch of each step is the twin's, whoever made it, so losses and parameters are the twin's too, except
    for rounding: another number of ranks sums in another order."""
    twin = side_by_side(went_on(trainer), second(went_on(trainer)))
    run = side_by_side(taken_over(went_on(trainer)), second(healed(trainer)))
    for name in ("loss_continuity", "parameter_digest", "sample_accounting"):
        assert said(name, run, [twin])[0] is Outcome.PASSED, said(name, run, [twin])
    assert "without replica 1, and the others took over its samples: all" in said("sample_accounting", run, [twin])[1]
    for much, outcome in ((1e-7, Outcome.PASSED), (1e-2, Outcome.FAILED)):
        off = [changed(part, much) for part in (taken_over(went_on(trainer)), second(healed(trainer)))]
        assert said("loss_continuity", side_by_side(*off), [twin])[0] is outcome, much
        reason = said("loss_continuity", side_by_side(*off), [twin])[1]
        assert outcome is Outcome.PASSED or "A replica had gone or come back by then" in reason, reason
    again = altered(second(healed(trainer)), lambda data: {**data, **consumed(3)})
    outcome, reason = said("sample_accounting", side_by_side(taken_over(went_on(trainer)), again), [twin])
    assert (outcome, "steps 4 and 21" in reason) == (Outcome.FAILED, True), reason


def changed(run: Record, much: float) -> Record:
    """With losses that differ by so much from step 21 on."""
    steps = 0
    events = []
    for one in run.events:
        steps += one.kind is Kind.STEP
        late = one.kind is Kind.STEP and (one.attempt == 1 or (one.step or 0) > 20)
        data = {**one.data, "losses": [loss * (1 + much) for loss in one.data["losses"]]} if late else one.data
        events.append(replace(one, data=data))
    assert steps
    return replace(run, events=tuple(events))


def test_samples_that_nobody_consumed_may_be_allowed(trainer: Any) -> None:
    """Whether the samples of an absent replica may be skipped is the user's decision, as a number."""
    run, twin = side_by_side(went_on(trainer), healed(trainer)), side_by_side(went_on(trainer), went_on(trainer))
    outcome, reason = said("sample_accounting", run, [twin], skipped=12)
    assert (outcome, "nobody consumed its 12 samples" in reason) == (Outcome.PASSED, True), reason
    outcome, reason = said("sample_accounting", run, [twin], skipped=11)
    assert (outcome, "12 samples; 11 may be skipped" in reason) == (Outcome.FAILED, True), reason


def test_the_longest_stall_is_that_of_the_whole_job(trainer: Any) -> None:
    """The time in which one replica was away is no stall, because the other made steps."""
    run = side_by_side(went_on(trainer), healed(trainer))
    twin = side_by_side(went_on(trainer), went_on(trainer))
    outcome, reason = said("recovery_time", run, [twin], stall=1.0)
    assert (outcome, "no stall was longer than" in reason) == (Outcome.PASSED, True), reason
    outcome, reason = said("recovery_time", run, [twin], stall=0.01)
    assert (outcome, "no step was completed for" in reason) == (Outcome.FAILED, True), reason


def test_no_more_twins_are_run_for_what_is_not_compared(trainer: Any) -> None:
    """A replica that went on alone made other steps than any twin; where none did, a run that differs wants more."""
    twin = side_by_side(went_on(trainer), went_on(trainer))
    assert not wants_more(side_by_side(went_on(trainer), healed(trainer)), [twin])
    assert wants_more(side_by_side(went_on(trainer), healed(trainer)), [])
    other = altered(healed(trainer, at=17), lambda data: {**data, "losses": [1.0]})
    assert wants_more(side_by_side(went_on(trainer), other), [twin])


def test_where_nobody_went_on_alone_all_is_compared(trainer: Any) -> None:
    """Replicas that wait for each other make the twin's steps, and then bitwise the same."""
    run = side_by_side(went_on(trainer), healed(trainer, at=17))
    twin = side_by_side(went_on(trainer), went_on(trainer))
    for name in ("loss_continuity", "parameter_digest", "sample_accounting"):
        assert said(name, run, [twin])[0] is Outcome.PASSED, said(name, run, [twin])


def joined(run: Record, at: int) -> Record:
    """A replica that is there from the start, and joins when the others have done `at` steps, with their state."""
    kept = [
        replace(one, step=one.step - at) if one.kind is Kind.STEP and one.step else one
        for one in run.events if one.kind is not Kind.STEP or (one.step or 0) > at
    ]  # fmt: skip
    return uncounted(replace(run, events=tuple(kept)))


def uncounted(run: Record) -> Record:
    """Its optimizer counts no steps, as SGD does, and it has no schedule."""
    return replace(run, events=tuple(
        replace(one, data={**one.data, "opt_step": None, "sched_step": None}) if one.kind is Kind.STEP else one
        for one in run.events
    ))  # fmt: skip


def test_a_replica_that_first_joins_late_is_placed_by_its_parameters(trainer: Any) -> None:
    """Its first step is the one after which a replica that was there before had the same parameters."""
    twin = side_by_side(went_on(trainer), went_on(trainer))
    run = side_by_side(went_on(trainer), joined(went_on(trainer), 5))
    assert [part.history.attempts[0].base for part in run.of_replicas] == [0, 5]
    outcome, reason = said("parameter_digest", run, [twin], replicas_only=True)
    assert (outcome, "equal after each of 25 steps" in reason) == (Outcome.PASSED, True), reason
    assert "5 steps (1 to 5) were made without replica 1" in said("sample_accounting", run, [twin])[1]
    off = changed_parameters(joined(went_on(trainer), 5))
    outcome, reason = said("parameter_digest", side_by_side(went_on(trainer), off), [twin], replicas_only=True)
    assert outcome is Outcome.FAILED, reason


def changed_parameters(run: Record) -> Record:
    return replace(run, events=tuple(
        replace(one, data={**one.data, "parameters": f"{one.step} of its own"}) if one.kind is Kind.STEP else one
        for one in run.events
    ))  # fmt: skip


def test_a_replica_that_is_not_healed_is_failed(trainer: Any) -> None:
    """It comes back with other weights, or from before what its peer had done, or with the first samples again."""
    twin = side_by_side(went_on(trainer), went_on(trainer))
    back = healed(trainer)
    other = altered(back, lambda data: {**data, "parameters": "others"})
    outcome, reason = said("parameter_digest", side_by_side(went_on(trainer), other), [twin], replicas_only=True)
    assert outcome is Outcome.FAILED
    assert "after step 21 the parameters of rank 0 in replica 1 are not those in replica 0" in reason
    assert said("restarts", side_by_side(went_on(trainer), back), min=1)[1].startswith("replica 0: ")
    samples = iter(range(1000))
    again = altered(back, lambda data: {**data, **consumed(next(samples)), "parameters": "others"})
    outcome, reason = said("sample_accounting", side_by_side(went_on(trainer), again), [twin])
    assert (outcome, "replica 1" in reason) == (Outcome.FAILED, True), reason
    stale = side_by_side(went_on(trainer), later(healed(trainer, at=17), 0.1))
    outcome, reason = said("no_lost_work", stale, [twin])
    assert (outcome, "went on from step 17, although another replica" in reason) == (Outcome.FAILED, True), reason
    both = side_by_side(went_on(trainer), healed(trainer), later(healed(trainer, at=17), 0.1))
    outcome, reason = said("no_lost_work", both, [side_by_side(*[went_on(trainer)] * 3)])
    assert (outcome, "of replica 2 went on from step 17" in reason) == (Outcome.FAILED, True), reason


def altered(run: Record, change: Any) -> Record:
    """With other steps after the restart."""
    return replace(run, events=tuple(
        replace(one, data=change(one.data)) if one.kind is Kind.STEP and one.attempt == 1 else one for one in run.events
    ))  # fmt: skip


def consumed(step: int) -> dict[str, Any]:
    rows = list(range(4 * step, 4 * step + 4))
    return {"samples": [f"d{row}" for row in rows], "indices": rows}


def later(run: Record, seconds: float) -> Record:
    """All that comes after the restart comes so much later."""
    return replace(run, events=tuple(
        replace(one, mono_s=one.mono_s + seconds) if one.attempt == 1 else one for one in run.events
    ))  # fmt: skip


def verdict(run: Record, *names: str) -> Any:
    plan = replace(run.plan, asserts=tuple(Named(name, {}) for name in names))
    return verdict_of(replace(run, plan=plan), [], "/run")


def test_the_verdict_is_of_the_replica_that_was_hit(trainer: Any) -> None:
    """The gates look at its own history, and the target is named by replica and rank."""
    result = verdict(side_by_side(went_on(trainer), healed(trainer)), "recovery_time", "restarts")
    assert result.verdict is Verdict.PASSED, result.reason
    assert result.faults[0].target == "rank 0 of replica 1"
    assert (result.steps, result.attempts, len(result.recoveries)) == (30, 2, 1)


@pytest.mark.parametrize("dies", [0, 1])
def test_of_two_replicas_that_were_hit_the_worst_counts(trainer: Any, dies: int) -> None:
    """One of them was healed, the other died for good: the job has not outlived that fault, whichever it was."""
    parts = [healed(trainer), healed(trainer)]
    parts[dies] = replace(parts[dies], events=tuple(
        replace(one, data={**one.data, "exit_code": 1}) if one.kind is Kind.JOB_EXITED else one
        for one in parts[dies].events if one.attempt != 1
    ))  # fmt: skip
    run = side_by_side(*parts)
    fault = replace(KILL, target=Target((0, 1)))
    result = verdict(replace(run, plan=replace(run.plan, faults=(fault,))), "recovery_time")
    (told,) = result.faults
    assert told.verdict is Verdict.FAILED, told
    assert told.reason.startswith(f"replica {dies}: ")


def test_the_others_must_end_well_too(trainer: Any) -> None:
    """A replica that was not hit and ends with an error makes the run failed, whatever is asserted."""
    first = went_on(trainer)
    *events, last = first.events
    broken = replace(first, events=(*events, replace(last, data={**last.data, "exit_code": 1})))
    result = verdict(side_by_side(broken, healed(trainer)), "recovery_time")
    assert (result.verdict, "replica 0, which was not hit" in result.reason) == (Verdict.FAILED, True), result.reason


def test_ranks_are_numbered_one_replica_after_the_other() -> None:
    """Agent and harness read the same number from the environment of a rank; without replicas it is RANK."""
    env = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", wire.ENV_PLAN: "/plan",
        wire.ENV_REPLICA: "2",
    }  # fmt: skip
    agents, harnesses = startup.identify(env, 7), Identity.of(env)
    assert agents
    assert harnesses
    assert (agents.rank, agents.local_rank, agents.world_size) == (9, 1, 4)
    assert (harnesses.rank, harnesses.local_rank, harnesses.world_size, harnesses.node) == (9, 1, 4, 2)
    del env[wire.ENV_REPLICA]
    assert wire.rank_of(env) == 1


def planned(folder: Path, target: Any, job: dict[str, Any] | None = None, **more: Any) -> Plan:
    path = folder / "scenario.yaml"
    fault = {"inject": "process.kill", "target": target, "when": {"step": 8}}
    command = "torchrun --nproc-per-node 2 train.py"
    text = {"scenario": "two", "job": {"command": command, "replicas": 3, **(job or {})}, "faults": [fault]}
    path.write_text(yaml.safe_dump({**text, "assert": ["restarts"], **more}))
    return make_plan(load(path), path, 0)


@pytest.mark.parametrize(
    ("target", "ranks", "nodes"),
    [
        ({"replica": 1, "rank": 0}, (2,), ()),
        ({"replica": 2, "ranks": [0, 1]}, (4, 5), ()),
        ({"replica": 1}, (2, 3), ()),
        ({"node": 1}, (2, 3), (1,)),
        ({"local_rank": 1}, (1, 3, 5), ()),
        ("all", (0, 1, 2, 3, 4, 5), ()),
    ],
)
def test_a_target_names_the_replica(target: Any, ranks: Any, nodes: Any, tmp_path: Path) -> None:
    """A rank is one of a replica; the torchrun of a replica is that of the node of the same number."""
    plan = planned(tmp_path, target)
    assert (plan.job.world_size, plan.job.nodes, plan.job.replicas) == (6, 3, 3)
    assert plan.faults[0].target == Target(ranks, nodes)


@pytest.mark.parametrize(
    ("target", "more", "says"),
    [
        ({"rank": 1}, {}, "each of 3 replicas has a rank 1; write {replica: 0, rank: 1}"),
        ({"replica": 3, "rank": 1}, {}, "no replica 3; the job has 3"),
        ({"replica": 0, "rank": 2}, {}, "no rank 2 in a replica; each has 2"),
        ({"replica": 1, "rank": 1}, {"job": {"replicas": 1}}, "there is no replica 1; the job has 1"),
        ({"replica": 1}, {"job": {"world_size": 7}}, "7 ranks can't be shared out evenly among 3"),
        ({"replica": 1}, {"job": {"nodes": 2}}, "replicas of 2 nodes each can't be started"),
        ({"replica": 1}, {"launcher": "netns"}, "launcher: netns knows the ranks of one torchrun"),
        ({"replica": 1}, {"steady_state": ["ranks_up"]}, "steady_state knows the ranks of one torchrun"),
    ],
)
def test_what_replicas_can_not_do_is_refused(target: Any, more: Any, says: str, tmp_path: Path) -> None:
    """With one sentence that says what, and what to do."""
    with pytest.raises(UsageError, match=says.replace("{", r"\{")):
        planned(tmp_path, target, **more)


def test_the_story_tells_of_each_replica(trainer: Any) -> None:
    """Where an attempt begins is told of its own replica: attempt 1 of one is none of the other."""
    told = [moment.text for moment in happened(side_by_side(went_on(trainer), healed(trainer)))]
    assert [text for text in told if "begins" in text or "goes on after" in text] == [
        "replica 0: attempt 0 begins with step 1",
        "replica 1: attempt 0 begins with step 1",
        "replica 1: attempt 1 goes on after step 20, and no load of a checkpoint was seen",
    ]


def test_events_of_no_replica_are_everybodys(trainer: Any) -> None:
    """A note of the harness is in each part, and a line of one torchrun's log in its own alone."""
    run = side_by_side(went_on(trainer), healed(trainer))
    last = run.events[-1].mono_s
    note = Event(Kind.NOTE, "harness", 1, 0.0, last, data={"text": "it rains"})
    line = replace(note, kind=Kind.LOG_CAUSE, data={"cause": "rain", "line": "", "replica": 1})
    parts = replace(run, events=(*run.events, note, line)).of_replicas
    assert [sum(one.kind is Kind.NOTE for one in part.events) for part in parts] == [1, 1]
    assert [sum(one.kind is Kind.LOG_CAUSE for one in part.events) for part in parts] == [0, 1]
