"""Known failures of torch and gloo change the reason of a verdict, and never the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.ending import aborts_at_exit, has_aborted, teardown_aborts
from torchaos.harness.analysis.explanations import because, causes_in_words
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.plan import Named, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.reporting.terminal.narrator import Narrator

KILL = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(1, 18, Phase.BACKWARD), {}, "", "")
STALE = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused"


def judged(run: Record) -> Result:
    plan = replace(run.plan, faults=(KILL,), asserts=(Named("restarts", {}),))
    return verdict_of(replace(run, plan=plan), [], "/run")


def log_line(run: Record, cause: str, attempt: int, after_s: float, line: str = STALE) -> Event:
    at = next(event.mono_s for event in run.events if event.attempt == attempt) + after_s
    data = {"cause": cause, "line": line, "advice": "what helps"}
    return Event(Kind.LOG_CAUSE, "harness", 9_500 + attempt, 0.0, at, None, attempt, None, data)


def plus(run: Record, *more: Event) -> Record:
    return replace(run, events=tuple(sorted((*run.events, *more), key=lambda event: event.mono_s)))


@pytest.fixture
def lost(trainer: Any) -> Record:
    """Killed in step 18; the new attempt ends with exit code 1 before its first step, and so does the job."""
    run: Record = trainer(kills=[(18, 1)]).record()
    kept = [e for e in run.events if e.attempt != 1 or e.kind in (Kind.RANK_UP, Kind.AGENT_STARTED)]
    started = max(e.mono_s for e in kept if e.attempt == 1)
    events = [e for e in kept if e.mono_s <= started or e.kind is Kind.JOB_EXITED]
    events = [replace(e, data={**e.data, "exit_code": 1}) if e.kind is Kind.JOB_EXITED else e for e in events]
    for up in [e for e in kept if e.kind is Kind.RANK_UP and e.attempt == 1]:
        gone = {"pid": up.data["pid"], "start_ticks": 1, "exit_code": 1}
        events.append(
            Event(Kind.RANK_EXITED, "harness", 9_000 + (up.rank or 0), 0.0, started + 1, up.rank, 1, None, gone)
        )
    return plus(replace(run, events=()), *events)


def test_a_known_failure_changes_the_reason_and_nothing_else(lost: Record) -> None:
    """A restart that died of torchrun's stale store: failed as without it, and the reason names it, with its issue."""
    plain, named = judged(lost), judged(plus(lost, log_line(lost, "gloo-stale-store", 1, 0.5)))
    assert (plain.verdict, named.verdict) == (Verdict.FAILED, Verdict.FAILED)
    assert named.exit_code == plain.exit_code
    assert named.reason.startswith(plain.reason)
    assert "attempt 1, which ended with an error, shows a known failure, gloo-stale-store (torch" in named.reason
    assert [replace(one, reason="") for one in named.cases] == [replace(one, reason="") for one in plain.cases]


def test_a_job_that_came_back_has_no_such_excuse(trainer: Any) -> None:
    """The line in an attempt of a job that recovered is a note, and says nothing about why something else failed."""
    run = trainer(kills=[(18, 1)]).record()
    met = plus(run, log_line(run, "gloo-stale-store", 1, 0.1))
    assert because(met) == ""
    assert judged(met).verdict is Verdict.PASSED
    assert any("gloo-stale-store" in note for note in judged(met).notes)


def test_a_dead_peer_is_no_news(lost: Record) -> None:
    """That connections to a dead rank are reset explains nothing: neither a note nor a reason."""
    met = plus(lost, log_line(lost, "peer-gone", 1, 0.5, "Connection reset by peer"))
    assert (because(met), causes_in_words(met)) == ("", [])


def test_while_a_run_goes_on_only_causes_are_told(lost: Record) -> None:
    """Ranks lose their connections at a healthy end, too, so this is not told; a failure of a library is, once."""
    narrator = Narrator(lost.plan)
    gone = [log_line(lost, name, 1, 0.5, "some line") for name in ("store-gone", "peer-gone", "terminated")]
    assert [narrator.tell(event) for event in gone] == [None, None, None]
    stale = log_line(lost, "gloo-stale-store", 1, 0.5)
    told = narrator.tell(stale)
    assert told is not None
    assert (told.text, narrator.tell(stale)) == ("recognised: gloo-stale-store", None)


def test_while_a_run_goes_on_an_odd_norm_is_told_once(lost: Record) -> None:
    """There may be one for each backward: once in each attempt, as any later one says the same."""
    narrator = Narrator(lost.plan)
    data = {"text": "the norm of the gradient is inf", "norm": float("inf")}
    norms = [Event(Kind.NOTE, "rank1", at, 0.0, 0.0, 1, attempt, None, data) for attempt in (0, 1) for at in range(3)]
    told = [narrator.tell(event) for event in norms]
    assert [line.text if line else None for line in told] == [f"note: rank 1: {data['text']}", None, None] * 2
    plain = Event(Kind.NOTE, "rank1", 9, 0.0, 0.0, 1, 0, None, {"text": "a note"})
    assert [line.text for _ in range(2) if (line := narrator.tell(plain))] == ["note: a note"] * 2


def test_a_cause_of_a_later_version_speaks_for_itself(lost: Record) -> None:
    """A name that this version does not know is shown with its own advice, and explains no verdict."""
    met = plus(lost, log_line(lost, "brand-new", 1, 0.5, "some line"))
    assert causes_in_words(met) == ["brand-new: what helps"]
    assert because(met) == ""


def _aborted(run: Record) -> Record:
    """Rank 1 aborts after the last step, when its interpreter exits."""
    events = []
    for event in run.events:
        if event.kind is Kind.RANK_EXITED and event.rank == 1:
            events.append(
                Event(Kind.AGENT_ENDED, "rank1-a0", 9_000, 0.0, event.mono_s - 1e-3, 1, 0, None, {"unseen": []})
            )
            event = replace(event, data={**event.data, "exit_code": -6})
        events.append(event)
    return replace(run, events=tuple(events))


@pytest.mark.parametrize(("step", "whole", "aside"), [(30, True, 1), (29, True, 0), (30, False, 0), (None, True, 0)])
def test_only_a_verified_final_checkpoint_sets_an_abort_aside(
    trainer: Any, step: int | None, whole: bool, aside: int
) -> None:
    """The abort is recognised always; it is set aside where the newest checkpoint is of the last step, and whole."""
    kept: dict[str, object] = {
        "path": "last",
        "format": "dcp",
        "step": step,
        "complete": True,
        "loadable": True,
        "tensors": {},
        "values": {},
    }
    kept["problem"] = None if whole else "a tensor is not what was written"
    run = _aborted(trainer().record(inventory={"root": "/job/checkpoints", "checkpoints": [kept]}))
    assert has_aborted(run.events)
    assert len(aborts_at_exit(run)) == 1
    assert len(teardown_aborts(run)) == aside
    said = [note for note in causes_in_words(run) if "aborted at interpreter exit" in note]
    assert len(said) == 1
    assert ("set aside and counted" in said[0]) == bool(aside)


def test_without_an_inventory_nothing_is_set_aside(trainer: Any) -> None:
    """A final checkpoint that nobody looked at is not verified."""
    assert teardown_aborts(_aborted(trainer().record())) == []
    assert not has_aborted(trainer().record().events)


def test_the_victim_of_a_fault_has_not_lost_a_connection(trainer: Any) -> None:
    """The lines of the others, that the connection was closed, are no cause of its death."""
    run = trainer(kills=[(18, 1)]).record()
    for cause, told in (("peer-gone", False), ("cuda-out-of-memory", True)):
        reason = next(case for case in judged(plus(run, log_line(run, cause, 0, 2.0))).cases if case.name == "restarts")
        assert (f"({cause})" in reason.reason) is told, reason.reason


def test_replicas_that_part_without_a_fault_are_noted(trainer: Any) -> None:
    """Whatever else is wrong: the ranks of the twin held equal parameters, and then others."""

    def parted(event: Event) -> Event:
        apart = event.kind is Kind.STEP and event.rank == 1 and (event.step or 0) > 9
        return replace(event, data={**event.data, "parameters": f"{event.step:032x}"}) if apart else event

    run, twin = (trainer(state_seen=True, kills=kills).record() for kills in ([(18, 1)], []))
    noted = "without a fault too, the parameters of the ranks, equal at first, differ from step 10 on"
    for events, there in ((tuple(map(parted, twin.events)), True), (twin.events, False)):
        notes = verdict_of(run, [replace(twin, events=events)], "/run").notes
        assert (noted in notes) is there
