"""Samples of the GPUs that the job's ranks on this machine use: the events `gpu.sample`, and `gpu.event` for an Xid or
a lost GPU.

The process that asks the driver is host/nvml_reader.py. It is started when the first rank is up, if the driver's
library is on this machine. Missing samples are never evidence of anything."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from typing import Any

from torchaos.harness.host.gpu_devices import READER, driver_is_here
from torchaos.harness.interfaces import Emit, RankProcess
from torchaos.harness.protocol.wire import Kind

KEPT = 120  # samples of each GPU
_LOOK_S = 0.2
_MOST_S = 10.0  # a sample is recorded at least this often
_NO_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND
# A sample is also recorded when a value differs by this much from the last recorded one; for other values, by anything.
_STEP = {"busy_percent": 10, "memory_busy_percent": 10, "memory_bytes": 1 << 30, "power_w": 50, "temperature_c": 3,
         "sm_mhz": 100, "nvlink_bytes": float("inf"), "pcie_bytes": float("inf")}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    at_s: float  # CLOCK_MONOTONIC
    ranks: tuple[int, ...]
    values: Mapping[str, float]


class GpuWatch:
    """Watches the GPUs of the ranks in a thread of its own. `ranks`: returns the live ranks. `emit`: writes to the
    journal."""

    def __init__(self, ranks: Callable[[], Mapping[int, RankProcess]], emit: Emit) -> None:
        self._ranks, self._emit = ranks, emit
        self._users: dict[int, RankProcess] = {}  # by pid
        self._sent: dict[int, int | None] = {}
        self._told: dict[int, Sample] = {}  # by GPU: the last recorded sample
        self._places: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, deque[Sample]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def start(self) -> None:
        if driver_is_here():
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def seen(self) -> dict[int, list[Sample]]:
        """The newest samples of each GPU, in order of time."""
        return {gpu: list(samples) for gpu, samples in list(self._seen.items())}

    def _run(self) -> None:
        try:
            while not self._ended.is_set() and self._look():
                pass
        except Exception as error:  # the run goes on without samples
            self._note(f"the GPUs are no longer watched: {type(error).__name__}: {error}")
        if self._process:
            self._process.kill()
            with suppress(
                subprocess.TimeoutExpired
            ):  # while a question to a broken GPU lasts, no signal ends the process
                self._process.communicate(timeout=1.0)

    def _look(self) -> bool:
        """Reads the lines of the reader process. Returns whether to go on."""
        users = {rank.pid: rank for rank in self._ranks().values()}
        if users and not self._process:
            if util.find_spec("pynvml") is None:
                return self._note("the GPUs were not watched: nvidia-ml-py is missing; pip install 'torchaos[gpu]'")
            self._process = subprocess.Popen(
                READER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        if not self._process or not self._process.stdin or not self._process.stdout:
            return not self._ended.wait(_LOOK_S)
        # A container numbers its own GPUs, so the number in a container means nothing here.
        wanted = {pid: None if rank.inner_pid else rank.gpu for pid, rank in users.items()}
        if wanted != self._sent:
            self._users, self._sent = {**self._users, **users}, wanted
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
                self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _LOOK_S)[0]:
            return True
        more = os.read(self._process.stdout.fileno(), 1 << 16)
        for line in self._lines(more):
            self._take(line)
        return bool(more) or self._ended.is_set() or self._note("the GPUs are no longer watched: what asks NVML ended")

    def _lines(self, more: bytes) -> Iterator[dict[str, Any]]:
        *lines, self._rest = (self._rest + more).split(b"\n")
        return (json.loads(line) for line in lines)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "ended" in line:
            if line["code"] not in _NO_DRIVER:
                self._note(f"the GPUs were not watched: NVML says: {line['ended']}")
            self._ended.set()
        elif "values" in line:
            self._take_sample(line)
        else:
            place = self._places.get(line["gpu"], {"node": 0, "gpu": line["gpu"], "ranks": []})
            known = {"event": f"Xid {line['xid']}", "xid": line["xid"]} if "xid" in line else {"event": line["lost"]}
            self._emit(Kind.GPU_EVENT, {**place, **known})

    def _take_sample(self, line: Mapping[str, Any]) -> None:
        gpu, users = line["gpu"], [self._users[pid] for pid in line["pids"]]
        now = Sample(time.monotonic(), tuple(sorted({rank.rank for rank in users})), line["values"])
        self._seen.setdefault(gpu, deque(maxlen=KEPT)).append(now)
        last = self._told.get(gpu)
        if last and last.ranks == now.ranks and now.at_s - last.at_s < _MOST_S and not _differ(last.values, now.values):
            return
        self._told[gpu] = now
        self._places[gpu] = {"node": users[0].node, "gpu": gpu, "ranks": list(now.ranks)}
        self._emit(Kind.GPU, {**self._places[gpu], "values": dict(now.values), "pids": line["listed"]})

    def _note(self, text: str) -> bool:
        self._emit(Kind.NOTE, {"text": text})
        return False


def _differ(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return before.keys() != now.keys() or any(abs(now[name] - before[name]) >= _STEP.get(name, 1) for name in now)
