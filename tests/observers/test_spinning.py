"""A GPU that is busy and moves nothing, as samples show it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.monitoring.diagnosis.diagnosis import HIGH, Diagnosis
from torchaos.harness.monitoring.observers.hang_detectors import Opinion
from torchaos.harness.monitoring.observers.hang_watch import HangWatch
from torchaos.harness.monitoring.observers.resource_use import awaited, spinning
from torchaos.harness.monitoring.probes.gpu_probe import Sample
from torchaos.harness.protocol.wire import Event, Kind


def samples(*values: dict[str, float]) -> list[Sample]:
    return [Sample(10.0 + second, (1,), one) for second, one in enumerate(values)]


STILL = {"busy_percent": 100, "nvlink_bytes": 5e9}


def test_a_kernel_that_waits_is_a_fact() -> None:
    """Busy all the time, and no byte more on any link."""
    seen = {3: samples(STILL, STILL, {**STILL, "pcie_bytes": 7}, STILL)}
    assert list(spinning(seen, 10.0)) == [
        (1, "its GPU 3 was busy all the time for 3.0 s, and moved 0 bytes over NVLink")
    ]
    both = {**STILL, "pcie_bytes": 100}
    assert list(spinning({3: samples(both, {**both, "pcie_bytes": 4196})}, 10.0)) == [
        (1, "its GPU 3 was busy all the time for 1.0 s, and moved 0 bytes over NVLink and 4096 bytes over PCIe")
    ]


@pytest.mark.parametrize(
    "seen",
    [
        [],
        samples(STILL),
        samples({"busy_percent": 100}, {"busy_percent": 100}),
        samples({"nvlink_bytes": 5}, {"nvlink_bytes": 5}),
        samples(STILL, {**STILL, "busy_percent": 40}, STILL),
        samples(STILL, {**STILL, "nvlink_bytes": 9e9}),
        samples(STILL, {**STILL, "nvlink_bytes": 0}),
        samples(STILL, {"busy_percent": 100}),
    ],
)
def test_what_was_not_seen_is_not_said(seen: list[Sample]) -> None:
    """No or one sample, no counter, no utilization, a pause, traffic, and counters that began again or were lost."""
    assert list(spinning({0: seen}, 10.0)) == []


def test_only_the_time_of_the_hang_counts() -> None:
    """Before it, the same GPU moved data."""
    seen = {0: samples({**STILL, "nvlink_bytes": 0}, STILL, STILL)}
    assert list(spinning(seen, 10.0)) == []
    assert len(list(spinning(seen, 11.0))) == 1


def of(rank: int, *values: dict[str, float]) -> list[Sample]:
    return [Sample(10.0 + second, (rank,), one) for second, one in enumerate(values)]


UNUSED = {"busy_percent": 0, "nvlink_bytes": 5e9}


def test_the_one_idle_gpu_among_those_that_wait_is_named() -> None:
    """Its rank never launched the kernel for which the others' kernels wait."""
    seen = {0: of(0, STILL, STILL), 1: of(1, UNUSED, UNUSED), 2: of(2, STILL, STILL)}
    assert list(awaited(seen, 10.0)) == [
        (1, "its GPU 1 did nothing, while the GPUs of ranks 0, 2 were busy and moved nothing")
    ]


@pytest.mark.parametrize(
    "second",
    [
        of(1, UNUSED),
        of(1, UNUSED, STILL),
        of(1, STILL, STILL),
        of(1, {"nvlink_bytes": 5e9}, {"nvlink_bytes": 5e9}),
        of(1, STILL, {**STILL, "nvlink_bytes": 9e9}),
    ],
)
def test_nobody_is_named_where_it_is_not_sure(second: list[Sample]) -> None:
    """One sample, a GPU that worked or waits too or moves data, and no utilization; nor where as many are idle as
    wait."""
    assert list(awaited({0: of(0, STILL, STILL), 1: second, 2: of(2, STILL, STILL)}, 10.0)) == []
    assert list(awaited({0: of(0, STILL, STILL), 1: of(1, UNUSED, UNUSED)}, 10.0)) == []


def test_opinions_are_told_when_they_change() -> None:
    """Each observer's, with the values that led to it; a hang has those of all at that time."""
    told: list[tuple[Kind, dict[str, Any]]] = []

    def emit(kind: Kind, data: Any) -> Event:
        told.append((kind, data))
        return Event(kind, "harness", 0, 0.0, 0.0, data=data)

    watch = HangWatch(dict, list, None)
    blind = Opinion("stacks", 0.0, 0.0, ready=False, blind="py-spy is not installed")
    for quiet_s in (0.1, 0.2, 0.6, 5.0, 6.0):
        watch._tell([Opinion("metrics", quiet_s, 0.0, detail="rank 0 is stopped"), blind], emit, [], 10.0)
    opinions = [(data["observer"], data["opinion"]) for kind, data in told if kind is Kind.HANG_OPINION]
    assert opinions == [("metrics", "active"), ("stacks", "blind"), ("metrics", "suspects"), ("metrics", "hangs")]
    assert told[1][1]["detail"] == "py-spy is not installed"
    assert told[-1][1] == {
        "opinion": "hangs", "observer": "metrics", "quiet_s": 5.0, "bound_s": 0.8, "detail": "rank 0 is stopped",
    }  # fmt: skip
    assert Kind.HANG_DECLARED not in [kind for kind, _ in told]
    watch._tell([Opinion("metrics", 7.0, 0.0), Opinion("log", 7.0, 0.0), blind], emit, [], 10.0)
    assert [opinion["observer"] for opinion in told[-1][1]["opinions"]] == ["metrics", "log", "stacks"]


def test_the_report_of_a_hang_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the diagnosis found, which it does not change: nobody is blamed for a busy GPU."""
    now = time.monotonic()
    seen = {3: [Sample(now - 3 + second, (1,), STILL) for second in range(3)]}
    told: list[tuple[Kind, dict[str, Any]]] = []

    def emit(kind: Kind, data: Any) -> Event:
        told.append((kind, data))
        return Event(kind, "harness", 0, 0.0, now, data=data)

    monkeypatch.setattr(live_job, "diagnose", lambda *_any, **_more: Diagnosis())
    watch = HangWatch(dict, list, None, gpus=lambda: seen)
    quiet = [Opinion("stacks", 5.0, 0.0), Opinion("log", 4.0, 0.0)]
    watch._tell(quiet, emit, [RankProcess(1, 1, 0, 7, 1, 0, 2, 3)], now)
    kind, declared = told[-1]
    assert kind is Kind.HANG_DECLARED
    assert declared["evidence"] == {"1": ["its GPU 3 was busy all the time for 2.0 s, and moved 0 bytes over NVLink"]}
    assert (declared["ranks"], declared["culprits"], declared["suspects"]) == ([], [], [])


@pytest.mark.parametrize(("known", "culprits"), [((), [1]), ((2,), [2])])
def test_an_idle_gpu_is_blamed_if_nobody_else_is(
    monkeypatch: pytest.MonkeyPatch, known: tuple[int, ...], culprits: list[int]
) -> None:
    """It is the weakest reason: what collectives or stacks have shown stands."""
    now = time.monotonic()
    seen = {
        rank: [Sample(now - 3 + second, (rank,), UNUSED if rank == 1 else STILL) for second in range(3)]
        for rank in range(3)
    }
    told: list[tuple[Kind, dict[str, Any]]] = []

    def emit(kind: Kind, data: Any) -> Event:
        told.append((kind, data))
        return Event(kind, "harness", 0, 0.0, now, data=data)

    def diagnosed(*_any: Any, **_more: Any) -> Diagnosis:
        found = Diagnosis()
        found.blame(known, HIGH, "it never entered a collective")
        return found

    monkeypatch.setattr(live_job, "diagnose", diagnosed)
    watch = HangWatch(dict, list, None, gpus=lambda: seen)
    quiet = [Opinion("stacks", 5.0, 0.0), Opinion("log", 4.0, 0.0)]
    watch._tell(quiet, emit, [RankProcess(rank, 1, rank, 7, 1, 0, 3, 3) for rank in range(3)], now)
    assert told[-1][1]["culprits"] == culprits
