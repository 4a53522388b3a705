"""Proof that a rank kept the others waiting, or no longer matches them. Reports of the target itself are no proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from torchaos.harness.analysis.felt_evidence import all_waited, out_of_step, slower, took_turns
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.injectors.collective_stall_nccl import StallNccl

PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0), (), ())
HIT_S = 10.05
STEP: dict[str, Any] = {"losses": [], "samples": []}


def event(kind: Kind, at: float, data: Mapping[str, Any], rank: int | None = None) -> Event:
    source = "harness" if rank is None else f"rank{rank}"
    return Event(kind, source, int(at * 1000), 0.0, at, rank, None if rank is None else 0, 1, data)


def steps(rank: int, *times: float) -> list[Event]:
    return [event(Kind.STEP, at, STEP, rank) for at in times]


def usual(rank: int, until: float = 10.0, every: float = 0.1) -> list[Event]:
    """Steps of a tenth of a second each, up to the fault."""
    return steps(rank, *(until - every * n for n in range(20)))


def record(*events: Event | list[Event], pid: int = 101) -> Record:
    flat = [one for some in events for one in (some if isinstance(some, list) else [some])]
    hit = event(Kind.APPLYING, HIT_S, {"fault": "f", "phase": "collective", "global_step": 5, "pid": pid}, 1)
    return Record(PLAN, tuple(sorted([*flat, hit], key=lambda one: one.mono_s)), {})


def rolled_back(at: float, fault: str = "f") -> Event:
    return event(Kind.ROLLED_BACK, at, {"fault": fault, "verified": True})


def exited(at: float, pid: int, code: int, rank: int) -> Event:
    return event(Kind.RANK_EXITED, at, {"pid": pid, "start_ticks": 1, "exit_code": code}, rank)


def test_silence_of_the_others_is_proof() -> None:
    """The other rank ends no step for the three seconds of the stall, one at its end: it waited."""
    after = steps(0, 10.1, 13.1, 13.2)
    found = all_waited(record(usual(0), usual(1), rolled_back(13.05), after, steps(1, 13.1)), "f")
    assert found is not None
    assert "3.00" in found.what


def test_nccls_own_service_is_a_witness() -> None:
    """What RAS says of the rank that was hit, while it was hit, is told. What it says of others or at other times is
    not."""
    data = {"observer": "nccl-ras", "opinion": "suspects", "quiet_s": 1.0, "bound_s": 2.0, "detail": "rank 1: behind"}

    def told(at: float, *ranks: int, observer: str = "nccl-ras") -> str:
        seen = event(Kind.HANG_OPINION, at, {**data, "observer": observer, "ranks": list(ranks)})
        found = all_waited(record(usual(0), usual(1), rolled_back(13.05), steps(0, 13.1), steps(1, 13.1), seen), "f")
        assert found
        return found.what

    assert told(12.0, 1).endswith("s; NCCL's RAS: rank 1: behind")
    assert all("RAS" not in text for text in (told(12.0, 0), told(9.0, 1), told(14.0, 1), told(12.0, 1, observer="x")))


def test_what_was_under_way_may_end_first() -> None:
    """One step that the other rank ends just after the fault landed takes nothing from the proof."""
    assert all_waited(record(usual(0), rolled_back(13.05), steps(0, 10.3, 13.1)), "f") is not None


def test_others_that_go_on_prove_the_opposite() -> None:
    """Where the other rank trains on, nobody was kept waiting, whatever the target itself says."""
    going = steps(0, *(10.1 + 0.1 * n for n in range(40)))
    assert all_waited(record(usual(0), usual(1), rolled_back(13.05), going, steps(1, 13.1)), "f") is None


def test_the_target_alone_is_no_witness() -> None:
    """With steps of the rank that was hit only, there is no proof."""
    assert all_waited(record(usual(1), rolled_back(13.05), steps(1, 13.1)), "f") is None


def test_a_stall_no_longer_than_a_step_is_not_told_from_one() -> None:
    """Steps that usually take two seconds prove nothing about a stall of two."""
    slow = usual(0, every=2.0)
    assert all_waited(record(slow, rolled_back(12.05), steps(0, 12.1)), "f") is None


def test_a_fault_that_was_never_taken_back_proves_nothing_yet() -> None:
    """Without an end there is no time to compare the silence with."""
    assert all_waited(record(usual(0)), "f") is None


def test_a_watchdog_that_ends_the_rank_ends_the_wait() -> None:
    """The silence until the stalled rank was ended counts; another process's end does not end it."""
    run = record(usual(0), exited(11.0, 999, 0, 3), exited(15.0, 101, -6, 1))
    found = all_waited(run, "f")
    assert found is not None
    assert "4.95" in found.what


def test_a_rank_that_gives_up_before_the_first_step_of_all_was_kept_waiting() -> None:
    """No rank has ended a step yet; another one leaves during the stall, and fails. Its process may take longer to be
    gone than the stall lasts. One that ends well, or that torchelastic ends, proves nothing."""
    left = event(Kind.AGENT_ENDED, 12.05, {"unseen": []}, 0)
    down = event(Kind.ELASTIC_TEARDOWN, 13.1, {"pid": 100, "signal": "SIGTERM"})
    found = all_waited(record(left, rolled_back(13.05), exited(14.0, 100, 1, 0)), "f")
    assert found is not None
    assert "2.00 s, and then rank 0 left" in found.what
    assert found.events == ((left.source, left.seq),)
    assert all_waited(record(exited(11.0, 100, -9, 0), rolled_back(13.05)), "f") is not None
    assert all_waited(record(left, rolled_back(13.05), exited(14.0, 100, 0, 0)), "f") is None
    assert all_waited(record(left, rolled_back(13.05), down, exited(14.0, 100, -15, 0)), "f") is None
    assert all_waited(record(rolled_back(13.05), exited(14.0, 100, 1, 0)), "f") is None


@pytest.mark.parametrize(
    ("during", "by_s", "factor", "felt"),
    [(0.32, 0.0, 3.0, True), (0.32, 0.2, 1.4, True), (0.32, 0.5, 1.4, False), (0.13, 0.0, 3.0, False)],
)
def test_slower_steps(during: float, by_s: float, factor: float, felt: bool) -> None:
    """Steps that clearly take longer while the fault is on are proof, measured by what was asked; a little is none."""
    slow = steps(0, *(10.1 + during * n for n in range(1, 9)))
    found = slower(record(usual(0), slow, rolled_back(13.05)), "f", by_s, factor)
    assert (found is not None) is felt


@pytest.mark.parametrize(
    ("before", "during", "after", "felt"),
    [(0.35, 0.3, 0.1, True), (0.1, 0.22, 0.2, False), (0.1, 0.3, 0.12, True), (0.3, 0.3, 0.3, False)],
    ids=["load before", "load from then on", "no load", "never"],
)
def test_the_load_of_the_machine_is_no_fault(before: float, during: float, after: float, felt: bool) -> None:
    """A machine that was busy until the fault came hides no fault that makes steps three times as long; a machine that
    is busy from then on makes no such fault."""
    slow, later = (
        steps(0, *(start + gap * n for n in range(1, count)))
        for start, gap, count in ((10.1, during, 9), (13, after, 40))
    )
    run = record(usual(0, every=before), slow, rolled_back(10.1 + 9 * during), later)
    assert (slower(run, "f", factor=3.0) is not None) is felt


def test_too_few_steps_to_say_whether_it_is_slower() -> None:
    """A fault right at the start can't be compared with anything."""
    assert slower(record(steps(0, 9.9, 10.0), steps(0, 10.5, 11.0), rolled_back(13.0)), "f") is None


def states(pid: int, letters: str) -> list[Event]:
    """What the kernel shows, every tenth of a second after the fault landed."""
    every = enumerate(letters, start=1)
    return [event(Kind.RANK_STATE, HIT_S + 0.1 * n, {"pid": pid, "state": letter}, 1) for n, letter in every]


@pytest.mark.parametrize(
    ("letters", "felt"), [("RTRTRTRTR", True), ("TSTRTS", True), ("TTTTTTT", False), ("TRTR", False), ("RSRSRS", False)]
)
def test_stopped_and_running_in_turns(letters: str, felt: bool) -> None:
    """Three turns that the kernel shows are proof; a process that is stopped for good, or never, took none."""
    assert (took_turns(record(states(101, letters), rolled_back(20.0)), "f") is not None) is felt


def test_turns_of_another_time_or_process() -> None:
    """Turns of another process, or after the fault was taken back, are no proof."""
    assert took_turns(record(states(100, "TRTRTR"), rolled_back(20.0)), "f") is None
    assert took_turns(record(states(101, "TRTRTR"), rolled_back(HIT_S + 0.15)), "f") is None


def test_a_failure_is_proof_of_a_mismatch() -> None:
    """The other rank dies of it: the collectives no longer matched."""
    found = out_of_step(record(usual(0), exited(11.0, 100, 1, 0)), "f")
    assert found is not None
    assert "exit code 1" in found.what


def test_a_clean_end_is_no_proof_of_a_mismatch() -> None:
    """All ranks end with 0: nobody but the target says that anything was out of order."""
    assert out_of_step(record(usual(0), exited(12.0, 100, 0, 0), exited(12.0, 101, 0, 1)), "f") is None


def test_an_abort_after_the_last_step_is_no_proof_of_a_mismatch() -> None:
    """A job that is done may abort while its interpreter ends, which is torch's doing; in its midst it is proof."""
    line = "terminate called without an active exception"
    told = event(Kind.LOG_CAUSE, 12.0, {"cause": "teardown-abort", "line": line, "file": "job.log"})
    here = {"start_ticks": 1, "world_size": 2, "node": 0}
    ranks = [event(Kind.RANK_UP, 5.0, {"pid": 100 + rank, "local_rank": rank, **here}, rank) for rank in (0, 1)]
    both = [usual(0), usual(1), steps(0, 10.2), steps(1, 10.2)]
    done = [exited(12.1, 100, 0, 0), exited(12.1, 101, -6, 1)]
    assert out_of_step(record(ranks, *both, told, done), "f") is None
    assert out_of_step(record(ranks, *both, done), "f") is not None


def test_a_hang_until_the_time_out_is_proof_of_a_mismatch() -> None:
    """The run had to be stopped, long after the last step of any rank."""
    stopped = event(Kind.STOPPED, 60.0, {"reason": "time-out", "interrupted": False})
    assert out_of_step(record(usual(0), stopped), "f") is not None
    going = steps(0, *(10.1 + 0.1 * n for n in range(500)))
    assert out_of_step(record(usual(0), going, stopped), "f") is None


def test_nothing_that_landed_is_no_proof() -> None:
    """Of a fault that never landed there is no evidence of any kind."""
    run = record(usual(0), rolled_back(13.05, "other"))
    assert (all_waited(run, "other"), slower(run, "other"), out_of_step(run, "other")) == (None, None, None)


@pytest.mark.parametrize(("held", "went_on", "felt"), [(True, True, True), (False, True, False), (False, False, True)])
def test_a_stall_of_nccl_that_held_no_call(held: bool, went_on: bool, felt: bool) -> None:
    """The others waited, for whatever reason. A rank that went on and does not say that NCCL held its call was not
    stalled by the fault; a rank that did not go on could say nothing."""
    note = event(Kind.NOTE, 13.06, {"text": "ncclAllReduce was held for 3.00 s", "fault": "f", "held_s": 3.0}, 1)
    own = steps(1, 13.1) if went_on else []
    run = record(usual(0), usual(1), rolled_back(13.05), steps(0, 10.1, 13.1, 13.2), own, [note] if held else [])
    assert (StallNccl(call="ncclAllReduce").felt(run, "f") is not None) is felt
