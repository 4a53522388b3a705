"""The kernel as an observer of hangs; the tests give what bpftrace would see. It is run in
tests/diagnosis/test_kernel.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from waiting import wait_until

from torchaos.harness.interfaces import RankProcess, UsageError
from torchaos.harness.monitoring.diagnosis.kernel_trace import Wait
from torchaos.harness.monitoring.observers.hang_detectors import KernelSleeps, Opinion, Rule

RANKS = [RankProcess(number, number, 0, os.getpid() + number, 1, 0, 2) for number in range(2)]
SLEEP = "in an uninterruptible sleep"


def _observer(*seen: Wait, lacks: str | None = None) -> KernelSleeps:
    return KernelSleeps(watch=lambda _pids, _seconds: seen, missing=lambda: lacks)


def _opinion(observer: KernelSleeps) -> Opinion:
    found: Opinion = wait_until(lambda: observer.look(True, RANKS), bool)
    return found


def test_a_rank_that_sleeps_without_a_break_is_named() -> None:
    """Its time is that of the look. A rank that reads from a slow disk is not named."""
    opinion = _opinion(_observer(Wait(0, SLEEP, 0.2, 0.9), Wait(1, SLEEP, 1.02, 1.02)))
    assert (opinion.quiet_s, opinion.ranks) == (1.02, (1,))
    assert opinion.detail == f"rank 1 was {SLEEP} for 1.02 s, 1.02 s in all"


def test_what_it_saw_is_forgotten_when_the_job_goes_on() -> None:
    """The next suspicion does not begin with the sleep of the last one."""
    observer = _observer(Wait(1, SLEEP, 1.0, 1.0))
    _opinion(observer)
    assert observer.words() == {1: f"the kernel saw it {SLEEP} for 1.00 s"}
    assert observer.look(False, RANKS) is None
    assert observer.words() == {}


def test_one_look_at_a_time_and_none_without_a_suspicion() -> None:
    """bpftrace is not started while another still looks, nor while the job is well, nor where it is missing."""
    looks, end = list[Mapping[int, int]](), threading.Event()

    def watch(pids: Mapping[int, int], _seconds: float) -> Sequence[Wait]:
        looks.append(pids)
        end.wait()
        return ()

    observer = KernelSleeps(watch=watch, missing=lambda: None)
    assert observer.look(False, RANKS) is None
    assert not looks
    for _ in range(5):
        assert observer.look(True, RANKS) is None
    wait_until(lambda: looks, bool)
    end.set()
    assert looks == [{rank.rank: rank.pid for rank in RANKS}]
    without = _observer(Wait(1, SLEEP, 1.0, 1.0), lacks="root")
    assert [without.look(True, RANKS) for _ in range(5)] == [None] * 5


def test_a_kernel_that_cannot_be_looked_into_is_told() -> None:
    """The observer is blind, and says why."""

    def watch(_pids: Mapping[int, int], _seconds: float) -> Sequence[Wait]:
        raise UsageError("bpftrace can't look into this kernel: no BTF")

    opinion = _opinion(KernelSleeps(watch=watch, missing=lambda: None))
    assert (opinion.ready, opinion.blind) == (False, "bpftrace can't look into this kernel: no BTF")


def test_a_sleep_confirms_no_hang() -> None:
    """A rank that writes its first checkpoint to a slow disk sleeps in the kernel, too, while no collective begins. It
    is a hang if an observer of processes says so."""
    asleep, late = Opinion("kernel", 5.0, 0.0, ranks=(1,)), Opinion("collectives", 5.0, 0.1)
    assert Rule().agree([asleep, late]) == []
    assert Rule().agree([asleep, late, Opinion("stacks", 5.0, 0.0)])
