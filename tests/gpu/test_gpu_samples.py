"""Samples of the GPUs of a job: what NVML shows, without a GPU, and what its failures lead to."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.host import gpu_devices as driver_side
from torchaos.harness.host.gpu_devices import READER, held_by, parent_of
from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.probes import gpu_probe
from torchaos.harness.monitoring.probes.gpu_probe import GpuWatch
from torchaos.harness.protocol.wire import Event, Kind

from . import fake_driver

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

Play = Callable[..., "Watched"]


class Watched:
    """The watch of some ranks, with what it emitted."""

    def __init__(self, *ranks: RankProcess) -> None:
        self.ranks = {rank.rank: rank for rank in ranks}
        self.told: list[tuple[Kind, dict[str, Any]]] = []
        self.watch = GpuWatch(lambda: self.ranks, self._emit)

    def _emit(self, kind: Kind, data: Any) -> Event:
        self.told.append((kind, dict(data)))
        return Event(kind, "harness", 0, 0.0, time.monotonic(), data=data)

    def of(self, kind: Kind) -> list[dict[str, Any]]:
        return [data for told, data in self.told if told is kind]

    def until(self, kind: Kind, many: int = 1) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = wait_until(lambda: self.of(kind), lambda told: len(told) >= many)
        return found


def rank(number: int, gpu: int | None, pid: int = 0, inner_pid: int = 0) -> RankProcess:
    return RankProcess(number, number, 0, pid or 7000 + number, 1, 0, 2, gpu, inner_pid)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path) -> Iterator[Play]:
    """Starts the watch of these ranks; the driver gives these answers."""
    made: list[Watched] = []

    def start(answers: str, *ranks: RankProcess) -> Watched:
        (tmp_path / "answers").write_text(answers)
        monkeypatch.setenv("ANSWERS", str(tmp_path / "answers"))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.parent))
        monkeypatch.setattr(gpu_probe, "driver_is_here", lambda: True)
        made.append(Watched(*ranks))
        made[-1].watch.start()
        return made[-1]

    yield start
    for one in made:
        one.watch.stop()


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overlay: Path) -> Iterator[Play]:
    """Starts the watch of these ranks; the overlay shows what is ordered."""
    made: list[Watched] = []

    def start(orders: str, *ranks: RankProcess) -> Watched:
        (tmp_path / "orders.nvml").write_text(orders)
        monkeypatch.setenv("TORCHAOS_NVML_CONTROL", str(tmp_path))
        monkeypatch.setenv("TORCHAOS_NVML_REAL", "none")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(overlay.parent))
        monkeypatch.setattr(gpu_probe, "driver_is_here", lambda: True)
        made.append(Watched(*ranks))
        made[-1].watch.start()
        return made[-1]

    yield start
    for one in made:
        one.watch.stop()


ORDERS = """gpus = 3
gpu0.ecc.volatile.uncorrected = 3
gpu0.nvlink0.replay = 20
gpu0.clocks_event_reasons = 0x40
gpu0.field.138 = 5
gpu0.field.139 = 7
gpu0.field.197 = 100
gpu0.field.198 = 200
gpu0.error.nvmlDeviceGetTemperature = 4
gpu0.error.nvmlDeviceGetPowerUsage = 13
"""


def test_a_sample_has_what_the_gpu_gives(simulate: Play) -> None:
    """Only the GPUs of the ranks, in the units of the table. What this user may not see, and what the driver or the
    GPU lacks, is left out."""
    told = simulate(ORDERS, rank(0, 0), rank(1, 2)).until(Kind.GPU, 2)
    assert {one["gpu"] for one in told} == {0, 2}
    (first,) = [one for one in told if one["gpu"] == 0][:1]
    assert first == {
        "node": 0, "gpu": 0, "ranks": [0], "pids": [], "values": {
            "busy_percent": 90, "memory_busy_percent": 40, "memory_bytes": 1 << 30, "sm_mhz": 1980,
            "clock_reasons": 0x40, "ecc_corrected": 0, "ecc_uncorrected": 3, "nvlink_bytes": 12 << 10,
            "nvlink_errors": 20, "pcie_bytes": 300,
        },
    }  # fmt: skip


def test_an_xid_and_a_lost_gpu_are_events(simulate: Play, tmp_path: Path) -> None:
    """Each once. The other GPU is watched as before."""
    watched = simulate("gpus = 2\n", rank(0, 0), rank(1, 1))
    watched.until(Kind.GPU, 2)
    (tmp_path / "bad.nvml").write_text("gpu1.xid = 79\ngpu1.lost = 1\n")
    told = watched.until(Kind.GPU_EVENT, 2)
    assert {"node": 0, "gpu": 1, "ranks": [1], "event": "Xid 79", "xid": 79} in told
    assert {"node": 0, "gpu": 1, "ranks": [1], "event": "GPU is lost"} in told
    before = len(watched.of(Kind.GPU))
    (tmp_path / "hot.nvml").write_text("gpu0.temperature = 95\n")
    (hot,) = watched.until(Kind.GPU, before + 1)[before:]
    assert (hot["gpu"], hot["values"]["temperature_c"]) == (0, 95)
    assert len(watched.of(Kind.GPU_EVENT)) == 2
    assert watched.of(Kind.NOTE) == []


def test_the_drivers_list_of_processes_wins(play: Play) -> None:
    """Rank 0's environment says GPU 0, and the driver shows it on GPU 3. What a container shows of GPUs is not used."""
    answers = "gpus 4\ngpu3.pid 7000\ngpu3.busy 100\ngpu0.busy 1\n"
    watched = play(answers, rank(0, 0), rank(1, 0, inner_pid=5))
    (first,) = watched.until(Kind.GPU)[:1]
    assert (first["gpu"], first["ranks"], first["pids"]) == (3, [0], [7000])
    assert {one["gpu"] for one in watched.of(Kind.GPU)} == {3}


def test_a_gpu_divided_by_mig_has_no_utilization(play: Play) -> None:
    """NVML does not support it there: it is left out, and the rest is sampled."""
    (first,) = play("gpus 1\ngpu0.mig 1\ngpu0.memory 5\n", rank(0, 0)).until(Kind.GPU)[:1]
    assert first["values"] == {"memory_bytes": 5}


def test_little_is_recorded_while_nothing_changes(play: Play, tmp_path: Path) -> None:
    """All samples are kept for the report of a hang, and one in ten is recorded. A change is recorded at once."""
    watched = play("gpus 1\ngpu0.busy 50\n", rank(0, 0))
    wait_until(lambda: len(watched.watch.seen().get(0, [])), lambda many: many >= 3)
    assert len(watched.of(Kind.GPU)) == 1
    (tmp_path / "answers").write_text("gpus 1\ngpu0.busy 100\n")
    assert watched.until(Kind.GPU, 2)[1]["values"]["busy_percent"] == 100


@pytest.mark.parametrize(
    ("answers", "note"),
    [
        ("init 9\n", None),
        ("init 18\n", "the GPUs were not watched: NVML says: RM has detected an NVML/RM version mismatch."),
        ("init 4\n", "the GPUs were not watched: NVML says: Insufficient Permissions"),
    ],
)
def test_why_there_are_no_samples(play: Play, answers: str, note: str | None) -> None:
    """Without a driver there are no GPUs, so nothing is said. Other reasons are noted, once."""
    watched = play(answers, rank(0, 0))
    wait_until(lambda: not watched.watch._thread.is_alive())
    assert watched.told == ([(Kind.NOTE, {"text": note})] if note else [])


def test_a_plain_install_is_told_what_is_missing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a driver, and no nvidia-ml-py."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (note,) = play("", rank(0, 0)).until(Kind.NOTE)
    assert note["text"] == "the GPUs were not watched: nvidia-ml-py is missing; pip install 'torchaos[gpu]'"


def test_a_reader_that_dies_is_noted(play: Play) -> None:
    """As a bug of the driver's library would end it. The run goes on."""
    watched = play("gpus 1\n", rank(0, 0))
    watched.until(Kind.GPU)
    assert watched.watch._process is not None
    watched.watch._process.kill()
    (note,) = watched.until(Kind.NOTE)
    assert note["text"] == "the GPUs are no longer watched: what asks NVML ended"


def test_the_reader_ends_with_its_harness(driver: Path, tmp_path: Path) -> None:
    """At the end of its input, whatever killed the harness."""
    (tmp_path / "answers").write_text("gpus 1\n")
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver.parent), "ANSWERS": str(tmp_path / "answers")}
    reader = subprocess.Popen(READER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert reader.stdin
    assert reader.stdout
    reader.stdin.write(b'{"1": 0}\n')
    reader.stdin.flush()
    assert json.loads(reader.stdout.readline())["gpu"] == 0
    reader.stdin.close()
    assert reader.wait(300) == 0
    reader.stdout.close()


def test_the_gpu_of_a_mig_device(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows it. A name that it does not know is an error."""
    (tmp_path / "answers").write_text("gpus 4\n")
    env = {"LD_LIBRARY_PATH": str(driver.parent), "ANSWERS": str(tmp_path / "answers")}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert [parent_of(name) for name in ("MIG-a", "MIG-b")] == [2, None]


def test_the_memory_that_processes_hold(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the end of a job. It is not known without a driver, or with a driver that does not answer."""
    monkeypatch.setenv("ANSWERS", str(tmp_path / "answers"))
    (tmp_path / "answers").write_text("gpus 2\ngpu1.pid 77\n")
    monkeypatch.setattr(driver_side, "driver_is_here", lambda: False)
    assert held_by([77]) is None
    monkeypatch.setattr(driver_side, "driver_is_here", lambda: True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.parent))
    assert held_by([77, 78]) == [{"gpu": 1, "pid": 77, "bytes": 1 << 30}]
    assert held_by([]) == []
    (tmp_path / "answers").write_text("init 18\n")
    assert held_by([77]) is None
    monkeypatch.setattr(driver_side, "READER", ("sh", "-c", "exec sleep 1000"))
    monkeypatch.setattr(driver_side, "_PATIENCE_S", 0.05)
    assert held_by([]) is None
