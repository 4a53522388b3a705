"""A rank is slowed from outside, in a real busy process: it is slow, the kernel shows it, and it runs normally
afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.fault_drivers.site import OutsideSite, Victim
from torchaos.harness.protocol.wire import Event, Kind, start_ticks
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.injectors.straggle import StraggleQuota, StraggleStop

PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0), (), ())


@pytest.fixture
def busy() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process.pid
    process.kill()
    process.wait()


class Told:
    """What injectors and probes say, as the journal would keep it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, kind: Kind, data: Any) -> Event:
        self.events.append(Event(kind, "harness", len(self.events), 0.0, time.monotonic(), data=data))
        return self.events[-1]


def site_of(pid: int, told: Told) -> OutsideSite:
    return OutsideSite("slow", [Victim(pid, start_ticks(pid) or 0, 1, 0)], told)


@pytest.mark.needs("root", "freezer")
def test_quota(busy: int) -> None:
    """The kernel holds the process back, that is the evidence, and afterwards it is where it was, at full speed."""
    told, injector = Told(), StraggleQuota(cpus=0.1)
    site, before = site_of(busy, told), Path(f"/proc/{busy}/cgroup").read_text()
    (handle,) = injector.changes(site)
    site = replace(site, undo_on_disk=(handle,))
    told(Kind.APPLYING, {"fault": "slow", "phase": None, "global_step": 1, "pid": busy})
    injector.apply(site)
    try:
        (probe,) = injector.probes(site)
        end = time.monotonic() + 30
        while not any(event.kind is Kind.EFFECT for event in told.events):
            assert time.monotonic() < end, "it was never held back"
            time.sleep(0.1)
            probe.sample(told)
    finally:
        handle.undo()
    found = injector.felt(Record(PLAN, tuple(told.events), {}), "slow")
    assert found is not None
    assert "throttled" in found.what
    assert handle.is_undone()
    assert Path(f"/proc/{busy}/cgroup").read_text() == before


def test_stop_takes_turns(busy: int) -> None:
    """One turn stops the process for its share of the period, and lets it go; a process that is gone is no error."""
    told, injector = Told(), StraggleStop(factor=4.0, period=0.4)
    (probe,) = injector.probes(site_of(busy, told))
    assert probe.period_s == pytest.approx(0.1)
    begun = time.monotonic()
    probe.sample(told)
    assert time.monotonic() - begun >= 0.3
    state = Path(f"/proc/{busy}/stat").read_text().rpartition(")")[2].split()[0]
    assert state != "T"
    with pytest.raises(ValueError, match="more than 1"):
        StraggleStop(factor=1.0)
