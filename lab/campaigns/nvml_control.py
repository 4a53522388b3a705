"""Tests the NVML overlay with random control files, in a build with address and undefined-behaviour sanitizers.

    python lab/campaigns/nvml_control.py [--files 20000] [--seed 0]

Each file consists of valid lines, mutated and cut, and of random bytes. After each file, calls of every kind are made
with structs of the right size. A crash or a report of a sanitizer ends the test with exit code 1, and the file is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KEYS = [
    "lost",
    "error",
    "error.nvmlDeviceGetName",
    "error.*",
    "xid",
    "event.512",
    "field.230",
    "field.208.3",
    "recovery_action",
    "unrepairable",
    "ecc.volatile.corrected",
    "ecc.volatile.uncorrected.l1",
    "ecc.aggregate.uncorrected.device",
    "ecc.aggregate.corrected.sram",
    "sram.volatile.corrected",
    "sram.threshold_exceeded",
    "retired.single_bit",
    "retired.double_bit",
    "retired.pending",
    "remap.failure",
    "remap.histogram.none",
    "repair.tpc",
    "nvlink0.state",
    "nvlink17.replay",
    "nvlink3.crc_flit",
    "clocks_event_reasons",
    "temperature",
    "power",
]
VALUES = ["0", "1", "3", "0x40", "999", "18446744073709551615", "4294967296", "99999999999999999999", "-1", "", "hot"]
NOISE = [b"\0", b"\xff", b"=", b"+=", b"#", b".", b"gpu", b"*", b"\r\n", b"\n", b"[", b"%s%n", b" " * 300, b"a" * 500]


def orders(draw: random.Random) -> bytes:
    lines = []
    for _ in range(draw.choice((0, 1, 3, 10, 60, 5000 if draw.random() < 0.02 else 5))):
        gpu = draw.choice(("gpu0.", "gpu1.", "gpu*.", "gpu63.", "gpu64.", "gpu-1.", "gpu99999999999.", ""))
        lines.append(f"{gpu}{draw.choice(KEYS)} {draw.choice(('=', '+=', '==', '+'))} {draw.choice(VALUES)}")
    if draw.random() < 0.5:
        lines.append(f"gpus = {draw.choice(('0', '1', '2', '64', '65', '-3'))}")
    text = bytearray("\n".join(lines).encode())
    for _ in range(draw.choice((0, 0, 1, 4, 20))):
        at = draw.randrange(len(text) + 1)
        what = draw.random()
        if what < 0.4:
            text[at:at] = draw.choice(NOISE)
        elif what < 0.7:
            del text[at : at + draw.randrange(1, 20)]
        elif text:
            text[at % len(text)] ^= 1 << draw.randrange(8)
    return bytes(text)


def call_all(library: ctypes.CDLL) -> None:
    """Makes one round of calls. They may return anything, but they must return."""
    device, events = ctypes.c_void_p(), ctypes.c_void_p()
    number, place = ctypes.c_ulonglong(), ctypes.create_string_buffer(4096)
    at = ctypes.byref(number)
    library.nvmlDeviceGetHandleByPciBusId_v2(b"00000000:11:00.0", ctypes.byref(device))
    for index in (0, 1, 63, 64):
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        for kind in range(2):
            library.nvmlDeviceGetTotalEccErrors(device, kind, 1 - kind, at)
            library.nvmlDeviceGetMemoryErrorCounter(device, kind, 0, 7, at)
            library.nvmlDeviceGetDetailedEccErrors(device, kind, 0, place)
            count = ctypes.c_uint(512)
            library.nvmlDeviceGetRetiredPages(device, kind, ctypes.byref(count), place)
        for name, size in (
            ("SramEccErrorStatus", 104),
            ("RepairStatus", 12),
            ("TemperatureV", 12),
            ("UnrepairableMemoryFlag_v1", 8),
        ):
            ctypes.c_uint.from_buffer(place).value = size | 1 << 24
            getattr(library, f"nvmlDeviceGet{name}")(device, place)
        library.nvmlDeviceGetRemappedRows_v2(device, place)
        library.nvmlDeviceGetRowRemapperHistogram(device, place)
        library.nvmlDeviceGetNvLinkErrorCounter(device, 17, 0, at)
        library.nvmlDeviceGetCurrentClocksEventReasons(device, at)
        ctypes.memset(place, 0, 4096)
        for n, field in enumerate((4, 17, 28, 38, 52, 96, 160, 163, 165, 208, 230, 301, 999)):
            ctypes.c_uint.from_buffer(place, 40 * n).value = field
            ctypes.c_uint.from_buffer(place, 40 * n + 4).value = n * 7
        library.nvmlDeviceGetFieldValues(device, 13, place)
        library.nvmlDeviceGetName(device, place, 64)
        if library.nvmlEventSetCreate(ctypes.byref(events)) == 0:
            library.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(8), events)
            library.nvmlEventSetWait_v2(events, place, 0)
            library.nvmlEventSetFree(events)


def child(folder: Path, files: int, seed: int) -> None:
    library, draw = ctypes.CDLL("libnvidia-ml.so.1"), random.Random(seed)
    library.nvmlInit_v2()
    for number in range(files):
        (folder / "number").write_text(str(number))
        (folder / "orders.nvml").write_bytes(orders(draw))
        call_all(library)
        library.nvmlInit_v2()  # one of the orders may have shut it out
        if number % 100 == 0:
            (folder / "nvml.log").unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.files, options.seed)
        return 0

    from torchaos.harness.host.native_libraries import NVML

    folder = Path(tempfile.mkdtemp(prefix="torchaos-nvml-"))
    sanitizers = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    made = NVML.build(folder / "lib", "gcc", *sanitizers)
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    environ = {
        **os.environ, "LD_PRELOAD": runtime.strip(), "ASAN_OPTIONS": "detect_leaks=0", "LD_LIBRARY_PATH": str(made.parent),
        "TORCHAOS_NVML_CONTROL": str(folder), "TORCHAOS_NVML_REAL": "none",
    }  # fmt: skip
    started = time.monotonic()
    words = [
        sys.executable,
        __file__,
        "--child",
        str(folder),
        "--files",
        str(options.files),
        "--seed",
        str(options.seed),
    ]
    done = subprocess.run(words, env=environ, check=False)
    number, took = (folder / "number").read_text(), time.monotonic() - started
    if done.returncode != 0:
        print(f"file {number} of seed {options.seed}: exit code {done.returncode}; it is {folder}/orders.nvml")
        return 1
    print(f"{options.files} control files, seed {options.seed}: no crash, no report by a sanitizer; {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
