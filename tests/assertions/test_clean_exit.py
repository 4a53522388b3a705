"""clean_exit: a job that has ended leaves nothing behind, and a job that is done ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchaos.assertions.clean_exit import CleanExit
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Kind

NOTHING: dict[str, Any] = {"waited_s": 0.0, "processes": [], "shared_memory": [], "gpu_memory": None}
PROCESS = {"pid": 77, "command": "python metrics.py", "ports": [4242], "rank": "0"}


def test_nothing_left_passes(trainer: Any) -> None:
    """And it is said that GPU memory was not looked at, where it wasn't."""
    assert isinstance(CleanExit(), Assertion)
    finding = CleanExit().judge(trainer(kills=[(18, 1)]).record(leftovers=NOTHING), [])
    assert finding.outcome is Outcome.PASSED
    assert "GPU memory was not looked at" in finding.reason


def test_what_is_left_is_named(trainer: Any) -> None:
    """A process by pid, command, port and GPU memory, and shared memory by name; also that the twin leaves it too."""
    gpu = [{"gpu": 0, "pid": 77, "bytes": 2 << 20}]
    left = {**NOTHING, "processes": [PROCESS], "gpu_memory": gpu}
    finding = CleanExit().judge(trainer().record(leftovers=left), [])
    assert finding.outcome is Outcome.FAILED
    assert "1 process (pid 77: python metrics.py, listening on port 4242, holding 2 MiB" in finding.reason
    shared = {**NOTHING, "shared_memory": [{"name": "psm_1", "bytes": 64, "of_job": True}]}
    finding = CleanExit().judge(trainer().record(leftovers=shared), [trainer().record(leftovers=shared)])
    assert (finding.outcome, "psm_1; 64 bytes" in finding.reason) == (Outcome.FAILED, True)
    assert "The twin leaves such things too" in finding.reason


def test_what_may_be_anothers_decides_nothing(trainer: Any) -> None:
    """A new entry in /dev/shm that no process of the job was seen to use; and a job that was not looked at."""
    strange = {**NOTHING, "shared_memory": [{"name": "other", "bytes": 64, "of_job": False}]}
    assert CleanExit().judge(trainer().record(leftovers=strange), []).outcome is Outcome.INCONCLUSIVE
    assert CleanExit().judge(trainer().record(), []).outcome is Outcome.INCONCLUSIVE


def test_a_job_that_is_done_and_stays_fails(trainer: Any) -> None:
    """Stopped by the time-out after its last step: failed. Before it: nothing can be said of what it left."""

    def stopped(steps: int) -> Any:
        run = trainer(steps=steps, kills=[(8, 1)]).record()
        last = next(e for e in reversed(run.events) if e.kind is Kind.STEP)
        told = replace(last, kind=Kind.STOPPED, rank=None, attempt=None, step=None, mono_s=last.mono_s + 30.0,
                       data={"reason": "the time-out"})  # fmt: skip
        alive = [e for e in run.events if e.mono_s <= last.mono_s]
        return replace(run, events=(*alive, told))

    finding = CleanExit().judge(stopped(30), [trainer().record()])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "was done after step 30 and did not end: ranks 0, 1 were still there 30 s later" in finding.reason
    assert "Most likely a thread that is no daemon, or a child process, waits for ever." in finding.reason
    assert CleanExit().judge(stopped(20), [trainer().record()]).outcome is Outcome.INCONCLUSIVE


def test_a_job_that_was_ended_gets_its_time_to_leave(trainer: Any) -> None:
    """One that was stopped on purpose, or by hand, was not waited for; and none is failed for less time than the twin
    took from its last step to its end, and some seconds more."""
    run, twin = trainer(kills=[(8, 1)]).record(), trainer().record()
    last = next(e for e in reversed(run.events) if e.kind is Kind.STEP)

    def judged(after_s: float, twin: Any = twin, **how: bool) -> Outcome:
        told = replace(last, kind=Kind.STOPPED, rank=None, attempt=None, step=None, mono_s=last.mono_s + after_s,
                       data={"reason": "", "interrupted": False, "enough": False, **how})  # fmt: skip
        alive = [e for e in run.events if e.mono_s <= last.mono_s]
        return CleanExit().judge(replace(run, events=(*alive, told)), [twin]).outcome

    assert judged(30.0) is Outcome.FAILED
    assert judged(0.05) is Outcome.INCONCLUSIVE
    for how in ("enough", "interrupted"):
        assert judged(30.0, **{how: True}) is Outcome.INCONCLUSIVE
    *others, ended = twin.events
    slow = replace(twin, events=(*others, replace(ended, mono_s=ended.mono_s + 40.0)))
    assert (judged(30.0, slow), judged(60.0, slow)) == (Outcome.INCONCLUSIVE, Outcome.FAILED)
