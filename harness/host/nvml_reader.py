"""Asks NVIDIA's driver about GPUs: `python -m torchaos.harness.host.nvml_reader`.

This is a process of its own, because a question about a broken GPU can take minutes, and the process that asks can't be
killed before the answer. Input, as lines of JSON: {pid: NVML's index of the GPU that this rank should use, or null}.
Output, every second: {"gpu", "pids", "listed", "values"}, where `listed` are the pids that the driver lists on the GPU;
and when it happens {"gpu", "xid"}, {"gpu", "lost"} or {"ended": why, "code"}. A value that the GPU, the driver or the
user's rights do not give is left out. The process ends at the end of its input.

`nvml_reader --parent MIG-UUID` prints NVML's index of the GPU that contains this MIG device. `nvml_reader --held
PID...` prints the memory that these processes hold: [{"gpu", "pid", "bytes"}]."""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

PERIOD_S = 1.0
_LOOKS = 60  # for this many periods, a rank that the driver does not list is looked for on all GPUs
_AGAIN_S = 10.0  # a GPU that was lost is tried again after this time
_ALL_LINKS = 0xFFFFFFFF  # nvml.h: the sum over all links
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


def _sum(nvml: Any, gpu: Any, fields: list[Any], least: int, unit: int = 1) -> int:
    """The sum of these fields, without those that the driver does not give. Raises NVMLError_NotSupported if it gives
    fewer than `least`."""
    found = [one for one in nvml.nvmlDeviceGetFieldValues(gpu, fields) if one.nvmlReturn == nvml.NVML_SUCCESS]
    if len(found) < least:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return unit * sum(int(getattr(one.value, _TYPES[one.valueType])) for one in found)


def _reasons(nvml: Any, gpu: Any) -> int:
    """Why the clocks are lower than they could be, as bits. Drivers before 535 know the function by its old name."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))


# The end of a name is the unit: percent of the time, bytes, watts, degrees Celsius, MHz; else bits, or errors. Counters
# of bytes and errors may begin at any number.
VALUES: Mapping[str, Callable[[Any, Any], float]] = {
    "busy_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_busy_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    "memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clock_reasons": _reasons,
    "ecc_corrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 0, nvml.NVML_VOLATILE_ECC),
    "ecc_uncorrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 1, nvml.NVML_VOLATILE_ECC),
    "nvlink_bytes": lambda nvml, gpu: _sum(nvml, gpu, [(138, _ALL_LINKS), (139, _ALL_LINKS)], 2, 1024),
    "nvlink_errors": lambda nvml, gpu: _sum(nvml, gpu, [38, 45, 52, 59], 1),  # CRC of flits and data, replay, recovery
    "pcie_bytes": lambda nvml, gpu: _sum(nvml, gpu, [197, 198], 2),
}


class Reader:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._wanted: dict[int, int | None] = {}
        self._listed: dict[int, set[int]] = {}  # GPUs by pid
        self._looks = 0
        self._lost: dict[int, float] = {}  # GPU: when it is tried again
        self._refused: set[tuple[int, str]] = set()
        self._handles: dict[int, Any] = {}
        self._events: Any = None

    def want(self, ranks: Mapping[str, int | None]) -> None:
        self._wanted = {int(pid): gpu for pid, gpu in ranks.items()}
        self._listed = {pid: gpus for pid, gpus in self._listed.items() if pid in self._wanted}
        self._looks = 0

    def sample(self) -> None:
        if self._looks < _LOOKS and self._wanted.keys() - self._listed.keys():
            self._looks += 1
            for gpu in range(self._nvml.nvmlDeviceGetCount()):
                self._list(gpu)
        users: dict[int, list[int]] = {}
        for pid, guess in self._wanted.items():
            for gpu in self._listed.get(pid, set() if guess is None else {guess}):
                users.setdefault(gpu, []).append(pid)
        self._listen(
            {gpu for gpu in users if gpu not in self._lost}
        )  # before the values are read, so that no Xid is missed
        for gpu, pids in sorted(users.items()):
            if time.monotonic() >= self._lost.get(gpu, 0.0) and (values := self._values(gpu)):
                listed = [pid for pid in pids if pid in self._listed]
                _say({"gpu": gpu, "pids": pids, "listed": listed, "values": values})
        self._listen({gpu for gpu in users if gpu not in self._lost})

    def wait(self) -> None:
        """Waits until the next period, and reports each Xid as soon as it comes."""
        end_s = time.monotonic() + PERIOD_S
        self._report(end_s)
        time.sleep(max(0.0, end_s - time.monotonic()))

    def _report(self, end_s: float) -> None:
        """Reports the Xids that have come, and those that come before `end_s`. Ends early if NVML returns an error,
        because the error of a lost GPU would come again at once."""
        nvml, at = self._nvml, {_address(handle): gpu for gpu, handle in self._handles.items()}
        with suppress(nvml.NVMLError):
            while self._events is not None:
                left_ms = int(1000 * max(0.0, end_s - time.monotonic()))
                event = nvml.nvmlEventSetWait_v2(self._events, left_ms)
                _say({"gpu": at.get(_address(event.device)), "xid": int(event.eventData)})

    def _list(self, gpu: int) -> None:
        with suppress(self._nvml.NVMLError, AttributeError):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in self._wanted:
                    self._listed.setdefault(process.pid, set()).add(gpu)

    def _values(self, gpu: int) -> dict[str, float]:
        nvml, values = self._nvml, dict[str, float]()
        never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        for name, ask in VALUES.items():
            if (gpu, name) in self._refused:
                continue
            try:
                values[name] = ask(nvml, nvml.nvmlDeviceGetHandleByIndex(gpu))  # a lost GPU has no handle
            except AttributeError:  # an early nvidia-ml-py
                self._refused.add((gpu, name))
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    if gpu not in self._lost:
                        _say({"gpu": gpu, "lost": str(error)})
                    self._lost[gpu] = time.monotonic() + _AGAIN_S
                    return {}
                if error.value in never:
                    self._refused.add((gpu, name))
        self._lost.pop(gpu, None)
        return values

    def _listen(self, gpus: set[int]) -> None:
        """If these GPUs differ from those before, makes a new set of events for them."""
        nvml = self._nvml
        if gpus == self._handles.keys():
            return
        self._report(0.0)  # an Xid often comes with the loss of the GPU
        with suppress(nvml.NVMLError):
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
        self._handles, self._events = dict.fromkeys(gpus), None
        with suppress(nvml.NVMLError, AttributeError):  # some platforms have no events, such as WSL
            self._events = nvml.nvmlEventSetCreate() if gpus else None
        for gpu in gpus if self._events is not None else ():
            with suppress(nvml.NVMLError):
                self._handles[gpu] = nvml.nvmlDeviceGetHandleByIndex(gpu)
                nvml.nvmlDeviceRegisterEvents(self._handles[gpu], nvml.nvmlEventTypeXidCriticalError, self._events)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value if handle is not None else None


def _say(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _input(reader: Reader, rest: bytes) -> bytes | None:
    """Reads the input that has arrived, without waiting. Returns an incomplete last line, or None at the end of the
    input."""
    while select.select([0], [], [], 0)[0]:
        more = os.read(0, 1 << 16)
        if not more:
            return None
        *lines, rest = (rest + more).split(b"\n")
        if lines:
            reader.want(json.loads(lines[-1]))
    return rest


def parent_of(nvml: Any, name: str) -> int:
    """NVML's index of the GPU that contains the MIG device. Raises NVMLError if the driver does not know the device."""
    mig = nvml.nvmlDeviceGetHandleByUUID(name)
    return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)))


def held_by(nvml: Any, pids: set[int]) -> list[dict[str, int]]:
    """The GPU memory that these processes hold. Raises NVMLError if the driver does not answer."""
    found = []
    for gpu in range(nvml.nvmlDeviceGetCount()):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(gpu)):
            if process.pid in pids:
                found.append({"gpu": gpu, "pid": int(process.pid), "bytes": int(process.usedGpuMemory or 0)})
    return found


def main(arguments: list[str]) -> int:
    import pynvml as nvml

    os.nice(10)
    try:
        nvml.nvmlInit()
        if arguments:
            name, *asked = arguments
            pids = {int(pid) for pid in asked if pid.isdigit()}
            print(json.dumps(parent_of(nvml, *asked) if name == "--parent" else held_by(nvml, pids)))
            return 0
        reader, rest = Reader(nvml), b""
        while (more := _input(reader, rest)) is not None:
            rest = more
            reader.sample()
            reader.wait()
    except nvml.NVMLError as error:
        _say({"ended": str(error), "code": error.value})
        return 1
    except BrokenPipeError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
