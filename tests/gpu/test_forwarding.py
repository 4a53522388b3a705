"""The overlay above a driver: the calls that it passes on, the values that it replaces, and the calls that it never
changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Ask
from .stand_in import ARGUMENTS, NAMES, SERVED

EVENTS = {
    "nvmlEventSetCreate": 1, "nvmlEventSetFree": 1, "nvmlEventSetWait": 3, "nvmlEventSetWait_v2": 3,
    "nvmlDeviceRegisterEvents": 3,
}  # fmt: skip
CALL_ALL = f"""
import ctypes, os
overlay, driver = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL(os.environ["TORCHAOS_NVML_REAL"])
class Call(ctypes.Structure):
    _fields_ = [("symbol", ctypes.c_long), ("argument", ctypes.c_long * {ARGUMENTS})]
driver.calls_made.restype = ctypes.POINTER(Call)
made, answer = ctypes.c_long(), []
taken = {EVENTS!r}  # these functions note which sets there are; how many arguments each has
for number, name in enumerate({NAMES!r}):
    if name in left_out:
        continue
    function = getattr(overlay, name)
    function.restype, function.argtypes = ctypes.c_long, [ctypes.c_long] * {ARGUMENTS}
    most, wide = taken.get(name, {ARGUMENTS}), 0 if name in taken else 1 << 40
    given = [number * wide + (place << 16) + 0x1234567 for place in range({ARGUMENTS})]
    driver.calls_made(ctypes.byref(made))
    returned = function(*given)
    calls = driver.calls_made(ctypes.byref(made))
    seen = [[calls[n].symbol, list(calls[n].argument)[:most] == given[:most]] for n in range(made.value)]
    if returned != 1000 + number or [number, True] not in seen or len(seen) > 2:
        answer.append([name, returned, seen])
"""


@pytest.mark.parametrize("orders", [None, "", "gpu0.xid = 79\n"], ids=["no control file", "an empty one", "one event"])
def test_every_function_passes_through_unchanged(ask: Ask, stand_in: Path, orders: str | None) -> None:
    """Eight arguments and the result of every symbol arrive as they are, when nothing is ordered of what they tell."""
    # Once something is ordered, what orders are laid over is called with true arguments alone, in the tests below; of
    # the rest, the driver is asked for the index of the device, by which orders are found, and nothing else is added.
    left_out = [name for name in NAMES if orders and SERVED[name] == "overlay"]
    assert ask(f"left_out = {left_out!r}\n{CALL_ALL}", orders, real=stand_in) == []


def test_symbols_are_those_of_the_table(overlay: Path) -> None:
    """The library exports what symbols.tsv lists, under the name by which all consumers load it, and nothing else."""
    names = subprocess.run(["nm", "-D", "--defined-only", overlay], capture_output=True, text=True, check=True).stdout
    assert sorted(line.split()[-1] for line in names.splitlines()) == sorted(NAMES)
    dynamic = subprocess.run(["readelf", "-d", overlay], capture_output=True, text=True, check=True).stdout
    assert "soname: [libnvidia-ml.so.1]" in dynamic


EVERY_KEY = """gpu0.ecc.volatile.uncorrected = 3
gpu0.ecc.volatile.corrected.l1 = 4
gpu0.sram.volatile.corrected = 1
gpu0.retired.double_bit = 3
gpu0.retired.pending = 1
gpu0.remap.corrected = 1
gpu0.remap.histogram.low = 1
gpu0.repair.tpc = 1
gpu0.unrepairable = 1
gpu0.nvlink0.state = 0
gpu0.nvlink0.replay = 9
gpu0.clocks_event_reasons = 0x40
gpu0.temperature = 95
gpu0.power = 1
gpu0.recovery_action = 1
"""
# Each function with what it is given: the device, numbers, and places of so many bytes (and what stands in their first
# four), which end at a page that may not be touched.
STRUCTS = """
import ctypes, mmap, os
overlay = ctypes.CDLL("libnvidia-ml.so.1")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
PAGE = mmap.PAGESIZE
base = libc.mmap(None, ctypes.c_size_t(2 * PAGE), 3, 0x22, -1, ctypes.c_long(0))
assert libc.mprotect(ctypes.c_void_p(base + PAGE), ctypes.c_size_t(PAGE), 0) == 0
device = ctypes.c_void_p()
overlay.nvmlInit_v2()
assert overlay.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
v = lambda size, number=1: (size, size | number << 24)
calls = {
    "nvmlDeviceGetTotalEccErrors": (1, 0, (8,)), "nvmlDeviceGetMemoryErrorCounter": (1, 0, 2, (8,)),
    "nvmlDeviceGetDetailedEccErrors": (1, 0, (32,)), "nvmlDeviceGetSramEccErrorStatus": (v(104),),
    "nvmlDeviceGetRetiredPagesPendingStatus": ((4,),), "nvmlDeviceGetRemappedRows_v2": ((24,),),
    "nvmlDeviceGetRowRemapperHistogram": ((20,),), "nvmlDeviceGetRepairStatus": (v(12),),
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": (v(8),), "nvmlDeviceGetNvLinkState": (0, (4,)),
    "nvmlDeviceGetNvLinkErrorCounter": (0, 0, (8,)), "nvmlDeviceGetCurrentClocksEventReasons": ((8,),),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ((8,),), "nvmlDeviceGetTemperature": (0, (4,)),
    "nvmlDeviceGetTemperatureV": (v(12),), "nvmlDeviceGetPowerUsage": ((4,),), "nvmlDeviceGetFieldValues": (1, (40, 230)),
    "nvmlDeviceGetMemoryInfo": ((24,),), "nvmlDeviceGetMemoryInfo_v2": (v(40, 2),), "nvmlDeviceGetPciInfo": ((32,),),
    "nvmlDeviceGetPciInfo_v2": ((36,),), "nvmlDeviceGetPciInfo_v3": ((68,),), "nvmlDeviceGetUtilizationRates": ((8,),),
    "nvmlDeviceGetName": ((64,), 64), "nvmlDeviceGetUUID": ((41,), 41), "nvmlDeviceGetIndex": ((4,),),
}
answer = {}
for name, arguments in calls.items():
    given = [device]
    for one in arguments:
        if isinstance(one, tuple):
            at = base + PAGE - one[0]
            ctypes.memset(base, 0xA5, PAGE)
            ctypes.memset(at, 0, one[0])
            if len(one) > 1:
                ctypes.c_uint.from_address(at).value = one[1]
            given.append(ctypes.c_void_p(at))
        else:
            given.append(one)
    before = ctypes.string_at(base, PAGE - 128)
    code = getattr(overlay, name)(*given)
    answer[name] = [code, ctypes.string_at(base, PAGE - 128) == before]
wrong = overlay.nvmlDeviceGetMemoryInfo_v2(device, ctypes.c_void_p(base))
events, data = ctypes.c_void_p(), base + PAGE - 24
overlay.nvmlEventSetCreate(ctypes.byref(events))
overlay.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(8), events)
open(folder + "/event.nvml", "w").write("gpu0.xid = 79\\n")
answer["nvmlEventSetWait"] = [overlay.nvmlEventSetWait(events, ctypes.c_void_p(data), 5000), wrong == 25]
"""


def test_nothing_is_written_past_a_struct(ask: Ask) -> None:
    """Each function that is served fills a struct that ends at a forbidden page, and writes nothing before or after it:
    also the first version of the event, which is 8 bytes shorter. A wrong version is refused."""
    found = ask(STRUCTS, EVERY_KEY)
    assert {name: result for name, result in found.items() if result != [0, True]} == {}


LAID_OVER = """
import pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
answer = [n.nvmlDeviceGetTotalEccErrors(gpu, 1, 0), n.nvmlDeviceGetTemperature(gpu, 0), n.nvmlDeviceGetPowerUsage(gpu)]
"""
DRIVER = """
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 7); return 0; }
int nvmlDeviceGetIndex(void *d, unsigned *i) { *i = (long)d - 7; return 0; }
int nvmlDeviceGetTotalEccErrors(void *d, unsigned a, unsigned b, unsigned long long *n) { *n = 40; return 0; }
int nvmlDeviceGetTemperature(void *d, unsigned s, unsigned *t) { *t = 61; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *p) { return 3; }
"""


def test_orders_are_laid_over_what_the_driver_says(ask: Ask, tmp_path: Path) -> None:
    """+= adds to the driver's own value, = takes its place, what is not ordered stays, and what the GPU hasn't is given."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    (tmp_path / "driver.c").write_text(DRIVER)
    driver = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, tmp_path / "driver.c"], check=True)
    orders = "gpu0.ecc.volatile.uncorrected += 2\ngpu0.power = 300000\n"
    assert ask(LAID_OVER, orders, real=driver) == [42, 61, 300000]
    assert ask(LAID_OVER, "gpu0.temperature = 95\ngpu0.power += 5\n", real=driver) == [40, 95, 5]
