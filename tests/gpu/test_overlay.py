"""The overlay without a driver: the values that nvidia-ml-py gets from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.fault_drivers.gpu import XIDS

from .conftest import Ask

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

READ_ALL = """
import pynvml as n
n.nvmlInit()
one, two = n.nvmlDeviceGetHandleByIndex(0), n.nvmlDeviceGetHandleByIndex(1)
def of(gpu):
    sram = n.c_nvmlEccSramErrorStatus_v1_t()
    n.nvmlDeviceGetSramEccErrorStatus(gpu, n.byref(sram))
    detailed = n.nvmlDeviceGetDetailedEccErrors(gpu, 1, 0)
    hist = n.nvmlDeviceGetRowRemapperHistogram(gpu)
    fields = {f.fieldId: f.value.ullVal for f in n.nvmlDeviceGetFieldValues(gpu, [4, 5, 12, 30, 145, 46, 52, 230, (208, 3)])}
    return {
        "volatile uncorrected": n.nvmlDeviceGetTotalEccErrors(gpu, 1, 0), "aggregate corrected": n.nvmlDeviceGetTotalEccErrors(gpu, 0, 1),
        "in l2": n.nvmlDeviceGetMemoryErrorCounter(gpu, 0, 1, 1), "detailed": [detailed.l2Cache, detailed.deviceMemory],
        "sram": [sram.volatileUncParity, sram.bThresholdExceeded], "pages": len(n.nvmlDeviceGetRetiredPages(gpu, 1)),
        "pages v2": len(n.nvmlDeviceGetRetiredPages_v2(gpu, 1)), "pages pending": n.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
        "rows": n.nvmlDeviceGetRemappedRows(gpu), "histogram": [hist.max, hist.none],
        "link": n.nvmlDeviceGetNvLinkState(gpu, 3), "replays": n.nvmlDeviceGetNvLinkErrorCounter(gpu, 0, 0),
        "reasons": n.nvmlDeviceGetCurrentClocksEventReasons(gpu), "temperature": n.nvmlDeviceGetTemperature(gpu, 0),
        "temperature v1": n.nvmlDeviceGetTemperatureV(gpu, 0), "power": n.nvmlDeviceGetPowerUsage(gpu), "fields": fields,
    }
answer = [of(one), of(two), n.nvmlDeviceGetCount(), n.nvmlDeviceGetMemoryInfo(one, version=n.nvmlMemory_v2).total]
"""
ORDERS = """
# by hand
gpus = 2
gpu0.ecc.volatile.uncorrected = 3
gpu0.ecc.aggregate.corrected.l2 += 5    # in one place: the sum has it too
gpu0.sram.volatile.uncorrected.parity = 2
gpu0.sram.threshold_exceeded = 1
gpu0.retired.double_bit = 2
gpu0.retired.pending = 1
gpu0.remap.uncorrected = 8
gpu0.remap.failure = 1
gpu0.remap.histogram.none = 1
gpu0.nvlink3.state = 0
gpu0.nvlink0.replay = 20
gpu0.nvlink3.receive = 7
gpu0.clocks_event_reasons = 0x40
gpu0.temperature = 95
gpu0.power += 1000
gpu0.recovery_action = 1
"""
EXPECTED = {
    "volatile uncorrected": 3, "aggregate corrected": 5, "in l2": 5, "detailed": [0, 3], "sram": [2, 1], "pages": 2,
    "pages v2": 2, "pages pending": 1, "rows": [0, 8, 0, 1], "histogram": [640, 1], "link": 0, "replays": 20,
    "reasons": 0x40, "temperature": 95, "temperature v1": 95, "power": 501000,
    "fields": {"4": 3, "5": 5, "12": 3, "30": 2, "145": 1, "46": 20, "52": 20, "230": 1, "208": 7},
}  # fmt: skip
HEALTHY = {
    "volatile uncorrected": 0, "aggregate corrected": 0, "in l2": 0, "detailed": [0, 0], "sram": [0, 0], "pages": 0,
    "pages v2": 0, "pages pending": 0, "rows": [0, 0, 0, 0], "histogram": [640, 0], "link": 1, "replays": 0,
    "reasons": 0, "temperature": 45, "temperature v1": 45, "power": 500000,
    "fields": dict.fromkeys(["4", "5", "12", "30", "145", "46", "52", "230", "208"], 0),
}  # fmt: skip


def test_values_are_read_as_ordered(ask: Ask) -> None:
    """nvidia-ml-py reads each kind of value as it was ordered, on the GPU it was ordered for, and health on the other."""
    assert ask(READ_ALL, ORDERS) == [EXPECTED, HEALTHY, 2, 80 << 30]


ON_NODES = """
import pynvml as n
n.nvmlInit()
answer = [n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByIndex(0), 0), n.nvmlDeviceGetPowerUsage(n.nvmlDeviceGetHandleByIndex(0))]
"""


def test_orders_for_one_node_are_served_on_that_node_alone(ask: Ask) -> None:
    """GPU 0 of node 0 is another than GPU 0 of node 1. Orders before the line are for every node, and a process that
    is on no node of the job, such as a watcher that runs outside of it, gets all."""
    orders = "gpu0.power = 7\nnode = 1\ngpu0.temperature = 95\n"
    found = [ask(ON_NODES, orders, env={"TORCHAOS_NODE": node}) for node in ("0", "1", "")]
    assert found == [[45, 7], [95, 7], [95, 7]]


EVENTS = """
import pynvml as n, threading
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
answer = []
for wait in (n.nvmlEventSetWait, n.nvmlEventSetWait_v2):
    events = n.nvmlEventSetCreate()
    n.nvmlDeviceRegisterEvents(gpu, n.nvmlEventTypeXidCriticalError, events)
    with open(folder + "/more.nvml", "a") as file:
        threading.Timer(0.1, lambda: (file.write("gpu0.xid = 79\\n"), file.flush())).start()
        event = wait(events, 30000)
        answer.append([event.eventType, event.eventData])
    try:
        wait(events, 20)
    except n.NVMLError as error:
        answer.append(error.value)
    n.nvmlEventSetFree(events)
"""


def test_an_xid_reaches_a_set_that_waits(ask: Ask) -> None:
    """Both versions of the wait return an Xid that is written while they wait, once, and none from before they began."""
    assert ask(EVENTS, "gpu0.xid = 48\n") == [[8, 79], 10, [8, 79], 10]


ERRORS = """
import pynvml as n
def code(call, *arguments):
    try:
        call(*arguments)
    except n.NVMLError as error:
        return error.value
    return 0
answer = [code(n.nvmlDeviceGetCount)]
n.nvmlInit()
one = n.nvmlDeviceGetHandleByIndex(0)
answer += [code(n.nvmlDeviceGetHandleByIndex, 1), code(n.nvmlDeviceGetName, one), code(n.nvmlDeviceGetSerial, one)]
answer += [code(n.nvmlDeviceGetFanSpeed, one), code(n.nvmlDeviceGetHandleByIndex, 5), code(n.nvmlSystemGetDriverVersion)]
open(folder + "/orders.nvml", "w").write("gpu0.error = 999\\n")
answer += [code(n.nvmlDeviceGetName, one), code(n.nvmlDeviceGetFanSpeed, one), code(n.nvmlSystemGetDriverVersion)]
open(folder + "/orders.nvml", "w").write("error.nvmlInit* = 9\\n")
answer += [code(n.nvmlInit), code(n.nvmlDeviceGetName, one)]
n.nvmlShutdown()
answer += [code(n.nvmlDeviceGetCount)]
"""


def test_errors_are_returned_as_ordered(ask: Ask) -> None:
    """A lost GPU, an unknown error of every call, of one by pattern, and of a call without a device; then all is well."""
    orders = "gpus = 2\ngpu1.lost = 1\ngpu0.error.nvmlDeviceGetSer* = 999\n"
    assert ask(ERRORS, orders) == [1, 15, 0, 999, 3, 2, 0, 999, 999, 0, 9, 0, 1]


def test_lines_that_cannot_be_read_are_told_of_and_left_out(ask: Ask, tmp_path: Path) -> None:
    """The log names file, line and reason of each, and the lines around them hold."""
    bad = [
        "nonsense",
        "gpu0.ecc = 3",
        "gpu0.temperature = hot",
        "gpu99.temperature = 3",
        "gpu0.power = -1",
        "= 3",
        "gpu0 = 1",
    ]
    answer = ask(READ_ALL, "gpus = 2\n" + "\n".join(bad) + "\ngpu0.temperature = 77\n")
    assert answer[0]["temperature"] == 77
    log = (tmp_path / "nvml.log").read_text()
    assert [line for line in range(2, 9) if f"refused line {line} of {tmp_path}/orders.nvml:" in log] == list(
        range(2, 9)
    )
    assert log.count("refused") == len(bad)
    assert "served gpu0.temperature = 77" in log


def test_every_order_of_every_xid_is_known(ask: Ask, tmp_path: Path) -> None:
    """No line of any Xid and its companions is refused by the overlay."""
    ask(
        READ_ALL,
        "gpus = 2\n"
        + "".join(f"gpu0.{order}\n" for xid in XIDS.values() for order in xid.all_orders() if "lost" not in order),
    )
    log = (tmp_path / "nvml.log").read_text()
    assert "served" in log
    assert "refused" not in log


SIZES = """
import pynvml as n, ctypes
structs = ["c_nvmlEccSramErrorStatus_v1_t", "c_nvmlMemory_v2_t", "c_nvmlTemperature_v1_t", "c_nvmlUnrepairableMemory_v1_t",
    "c_nvmlRowRemapperHistogramValues", "c_nvmlFieldValue_t", "c_nvmlEventData_t", "nvmlPciInfo_t", "c_nvmlEccErrorCounts_t"]
answer = {name: ctypes.sizeof(getattr(n, name)) for name in structs}
"""


def test_layouts_are_those_of_another_reader(ask: Ask) -> None:
    """nvidia-ml-py, which was written from the same header by somebody else, has the same sizes."""
    found: dict[str, Any] = ask(SIZES)
    assert found == {
        "c_nvmlEccSramErrorStatus_v1_t": 104, "c_nvmlMemory_v2_t": 40, "c_nvmlTemperature_v1_t": 12,
        "c_nvmlUnrepairableMemory_v1_t": 8, "c_nvmlRowRemapperHistogramValues": 20, "c_nvmlFieldValue_t": 40,
        "c_nvmlEventData_t": 32, "nvmlPciInfo_t": 68, "c_nvmlEccErrorCounts_t": 32,
    }  # fmt: skip
