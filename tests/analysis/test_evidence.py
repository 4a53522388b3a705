"""Evidence that the processes that a fault hit felt it, and observations that are no evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.analysis.felt_evidence import gone, stopped
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.injectors.cuda import Error, OutOfMemory
from torchaos.injectors.process_raise import Raise
from torchaos.plugin import Fault


def _hits(run: Record) -> tuple[Record, Event, Event]:
    """A fault `both` at the processes of both ranks, after step 10: rank 0's and rank 1's landing."""
    near = next(e for e in run.events if e.kind is Kind.STEP and (e.rank, e.step) == (1, 10))
    pids = {e.rank: e.data["pid"] for e in run.of_kind(Kind.RANK_UP)}
    hits = [
        Event(Kind.APPLYING, "harness", 10_000 + rank, 0.0, near.mono_s + 1e-4, rank, 0,
              data={"fault": "both", "phase": None, "global_step": None, "pid": pids[rank]})
        for rank in (0, 1)
    ]  # fmt: skip
    return replace(run, events=(*run.events, *hits)), hits[0], hits[1]


def test_all_that_were_hit_have_to_be_gone(trainer: Any) -> None:
    """With whatever exit code. One that is still there is no proof, nor the end of another process, nor that of one
    that had the pid before."""
    run, first, second = _hits(trainer().record())
    ends = {e.data["pid"]: e for e in run.of_kind(Kind.RANK_EXITED)}
    own, other = ends[first.data["pid"]], ends[second.data["pid"]]
    found = gone(run, "both")
    assert found
    assert found.what == f"pid {first.data['pid']}, {second.data['pid']} left"
    assert found.events == ((own.source, own.seq), (other.source, other.seq))
    before = replace(other, mono_s=second.mono_s - 1.0)
    stranger = replace(other, data={**other.data, "pid": 1})
    for instead in ((), (before,), (stranger,)):
        assert gone(replace(run, events=(*(e for e in run.events if e is not other), *instead)), "both") is None
    assert gone(run, "another") is None


def _state(hit: Event, letter: str, after_s: float, pid: int | None = None) -> Event:
    data = {"pid": hit.data["pid"] if pid is None else pid, "state": letter}
    return Event(Kind.RANK_STATE, "probe", 20_000 + (hit.rank or 0), 0.0, hit.mono_s + after_s, hit.rank, 0, data=data)


@pytest.mark.parametrize(
    ("letter", "after_s", "pid", "proof"),
    [("T", 0.5, None, True), ("S", 0.5, None, False), ("T", -0.5, None, False), ("T", 0.5, 1, False)],
)
def test_all_that_were_hit_have_to_be_seen_stopped(
    trainer: Any, letter: str, after_s: float, pid: int | None, proof: bool
) -> None:
    """By the kernel, after the landing, each of them by its own pid."""
    run, first, second = _hits(trainer().record())
    seen = (_state(first, "T", 0.5), _state(second, letter, after_s, pid))
    found = stopped(replace(run, events=(*run.events, *seen)), "both")
    assert (found is not None) is proof
    if found:
        assert found.what == f"the kernel showed pid {first.data['pid']}, {second.data['pid']} as stopped"
        assert found.events == (("probe", 20_000), ("probe", 20_001))


@pytest.mark.parametrize(("code", "proof"), [(1, True), (75, True), (-15, True), (-9, False)])
def test_a_rank_that_raised_may_be_ended_by_torchelastic(trainer: Any, code: int, proof: bool) -> None:
    """It saves before it ends, and another rank ends first: SIGTERM comes then. One that made another step bore the
    fault."""
    run = trainer(kills=[(18, 1)]).record()
    hit = next(run.of_kind(Kind.APPLYING))
    told = replace(run, events=tuple(
        replace(e, data={**e.data, "exit_code": code}) if e.kind in (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE) and
        e.data.get("pid") == hit.data["pid"] else e for e in run.events
    ))  # fmt: skip
    assert (Raise().felt(told, hit.data["fault"]) is not None) is proof
    step = next(e for e in run.of_kind(Kind.STEP) if e.source == hit.source)
    later = replace(step, seq=10_000, mono_s=hit.mono_s + 1e-4)
    assert Raise().felt(replace(told, events=(*told.events, later)), hit.data["fault"]) is None


def _hidden(run: Record, phase: str, others: int | None = None, until: int | None = None) -> Record:
    """The run with another phase of the hit, whose rank ends with exit code 0. `others`: the exit code of rank 0 in the
    same attempt; `until`: the last attempt."""
    hit = next(run.of_kind(Kind.APPLYING))

    def told(event: Event) -> Event | None:
        if event is hit:
            return replace(event, data={**event.data, "phase": phase})
        if until is not None and (event.attempt or 0) > until:
            return None
        if event.kind not in (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE) or event.attempt:
            return event
        code = 0 if event.data["pid"] == hit.data["pid"] else others
        return None if code is None else replace(event, data={**event.data, "exit_code": code})

    return replace(run, events=tuple(e for e in map(told, run.events) if e))


@pytest.mark.parametrize("injector", [Raise(), Error(), OutOfMemory()])
def test_a_rank_that_hides_its_error_in_the_middle_of_a_step_felt_it(trainer: Any, injector: Fault) -> None:
    """It ends with exit code 0, as if it had done its work. Before the backward, that may be so: a batch is asked for
    when there is none, and a model may be evaluated."""
    run = trainer(kills=[(18, 1)]).record()
    for phase in ("data", "forward", "backward", "optimizer", "checkpoint_write"):
        found = injector.felt(_hidden(run, phase, until=0), "kill")
        if phase in ("backward", "optimizer"):
            assert found
            assert found.what == f"pid 1001 ended with exit code 0 in the middle of a step ({phase})"
        else:
            assert found is None, phase


@pytest.mark.parametrize("injector", [Raise(), Error(), OutOfMemory()])
@pytest.mark.parametrize("phase", ["data", "forward", "checkpoint_write"])
def test_a_rank_that_hides_its_error_and_leaves_work_undone_felt_it(trainer: Any, phase: str, injector: Fault) -> None:
    """Others failed when it had left, or a later attempt or the twin made the step on this rank. A step that it had
    made itself, or that another rank made, shows nothing: the rank may have had no more to do."""
    run = trainer(kills=[(18, 1)]).record()
    failed = injector.felt(_hidden(run, phase, others=1, until=0), "kill")
    assert failed
    assert failed.what == "pid 1001 ended with exit code 0 and then pid 1000 ended with exit code 1"
    later = injector.felt(_hidden(run, phase), "kill")
    assert later
    assert later.what == "pid 1001 ended with exit code 0 before step 18, which rank 1 made in a later attempt"
    without = _hidden(run, phase, until=0)
    hit = next(run.of_kind(Kind.APPLYING))
    line = "gloo/transport/tcp/pair.cc:537] Connection closed by peer"
    lost = Event(Kind.LOG_CAUSE, "harness", 10_000, 0.0, hit.mono_s + 0.3, None, 0,
                 data={"cause": "peer-gone", "line": line})  # fmt: skip
    gone = injector.felt(replace(without, events=(*without.events, lost)), "kill")
    assert gone
    assert gone.what == (
        "pid 1001 ended with exit code 0 and, with no step after the fault, the log shows that a rank lost its "
        "connection to another"
    )
    other = replace(lost, data={"cause": "store-gone", "line": "the store"})
    assert injector.felt(replace(without, events=(*without.events, other)), "kill") is None
    twin = injector.felt_by_twin(without, [trainer().record()], "kill")
    assert twin
    assert twin.what == "pid 1001 ended with exit code 0 before step 18, which rank 1 made in the twin"
    assert injector.felt_by_twin(without, [trainer(stops=17).record()], "kill") is None
    alone = replace(run, events=tuple(e for e in run.events if e.attempt != 1 or e.rank == 0))
    assert injector.felt(_hidden(alone, phase), "kill") is None
    for source in ("rank0-a0", "rank1-a0"):
        step = next(e for e in run.of_kind(Kind.STEP) if e.source == source)
        went_on = replace(without, events=(*without.events, replace(step, seq=10_000, mono_s=hit.mono_s + 1e-4), lost))
        assert injector.felt(went_on, "kill") is None
    assert injector.felt_by_twin(went_on, [trainer().record()], "kill") is None


@pytest.mark.parametrize("blind", [False, True])
def test_a_job_that_caught_the_exception_and_loaded_a_checkpoint_felt_it(trainer: Any, blind: bool) -> None:
    """Its ranks went back to an earlier step, before any other step of the rank that raised. A step of it in between,
    as of a job that went on, makes the load no proof; nor is a load that the fault did not come before."""
    run = trainer(raises=(18, 1, 8.0), blind=blind, state_seen=True).record()
    hit = next(run.of_kind(Kind.APPLYING))
    for injector in (Raise(), Error(), OutOfMemory()):
        found = injector.felt(run, "raise")
        assert found is not None
        assert found.what == "the job loaded a checkpoint again, and went on from step 15 after step 17"
    step = next(e for e in run.of_kind(Kind.STEP) if e.source == hit.source)
    later = replace(step, seq=10_000, step=18, mono_s=hit.mono_s + 1e-4)
    events = sorted([*run.events, later], key=lambda e: e.mono_s)
    assert Raise().felt(replace(run, events=tuple(events)), "raise") is None
    after = replace(hit, mono_s=max(e.mono_s for e in run.events) + 1)
    moved = sorted((after if e is hit else e for e in run.events), key=lambda e: e.mono_s)
    assert Raise().felt(replace(run, events=tuple(moved)), "raise") is None


def test_a_job_that_caught_the_exception_and_put_back_what_it_kept_in_memory_felt_it(trainer: Any) -> None:
    """No load shows that: the next step began with an earlier state. What it lost is not denied, and with what it went
    on is judged."""
    run = trainer(raises=(18, 1, 8.0), loads_seen=False, state_seen=True, named=True).record()
    found = Raise().felt(run, "raise")
    assert found is not None
    assert found.what == ("the job put back a state that it had kept in memory, and went on from step 15 after step 17")
    twin = trainer(state_seen=True, named=True).record()
    reason = NoLostWork().judge(run, [twin]).reason
    assert reason.startswith("the job was not restarted, and went back to step 15 in memory"), reason
    judged = StateRestored().judge(run, [twin])
    assert judged.outcome is Outcome.PASSED
    assert judged.reason.startswith("parameters and moments of the optimizer are bit for bit as before"), judged.reason


@pytest.mark.parametrize(("at_s", "by_s", "proof"), [(7.5, 8.0, True), (-0.5, 8.0, False), (0.5, 0.6, False)])
def test_ranks_that_stand_still_until_the_log_shows_an_error_felt_it(
    trainer: Any, at_s: float, by_s: float, proof: bool
) -> None:
    """The job may go on from a state in memory. A pause alone, or an error in the log alone, is no proof."""
    run = trainer(freeze=(18, 1, by_s)).record()
    hit = next(run.of_kind(Kind.APPLYING))
    data = {"cause": "gloo-timeout", "line": "Timed out waiting 7000ms for recv operation to complete"}
    told = Event(Kind.LOG_CAUSE, "harness", 10_000, 0.0, hit.mono_s + at_s, None, 0, data=data)
    events = sorted([*run.events, told], key=lambda e: e.mono_s)
    found = Raise().felt(replace(run, events=tuple(events)), "freeze")
    assert (found is not None) is proof
    assert found is None or found.what.startswith("no rank ended a step for 7.5"), found
    assert Raise().felt(run, "freeze") is None
