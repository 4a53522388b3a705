"""Measures the time from the writing of an Xid to its return from nvmlEventSetWait in another process. Aim: p99 under
10 ms.

Usage: python lab/bench/nvml_xid.py [--events 300]

The overlay serves simulated GPUs. Each of the two versions of the wait gets half of the events. The time runs from the
line before the file is renamed into place to the line after the wait, both on CLOCK_MONOTONIC. It is compared with a
bare poll of the same file every 2 ms, which is how the overlay looks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAIT = """
import sys, time, pynvml as n
n.nvmlInit()
gpu, events = n.nvmlDeviceGetHandleByIndex(0), n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(gpu, 8, events)
print("ready", flush=True)
for number in range(int(sys.argv[1])):
    wait = n.nvmlEventSetWait_v2 if number % 2 else n.nvmlEventSetWait
    event = wait(events, 60000)
    print(time.monotonic_ns(), event.eventData, flush=True)
"""
LOOK = """
import os, sys, time
print("ready", flush=True)
seen = 0
for number in range(int(sys.argv[1])):
    while not os.path.exists(sys.argv[2]) or (now := os.stat(sys.argv[2]).st_ino) == seen:
        time.sleep(0.002)
    seen = now
    print(time.monotonic_ns(), 0, flush=True)
"""


def measure(script: str, events: int, folder: Path, env: dict[str, str]) -> list[float]:
    """The time for each event in milliseconds, sorted."""
    path, taken = folder / "orders.nvml", []
    words = [sys.executable, "-c", script, str(events), str(path)]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in range(events):
            time.sleep(0.01)
            fresh = folder / f"{number}.partial"
            fresh.write_text(f"gpu0.xid = {number + 1}\n")
            begun = time.monotonic_ns()
            os.replace(fresh, path)
            taken.append((int(process.stdout.readline().split()[0]) - begun) / 1e6)
    return sorted(taken)


def main() -> int:
    from torchaos.harness.host.native_libraries import NVML

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=300)
    events = parser.parse_args().events
    results = {}
    for name, script in (("overlay", WAIT), ("bare poll", LOOK)):
        with tempfile.TemporaryDirectory() as scratch:
            env = {
                **os.environ, "LD_LIBRARY_PATH": str(NVML.path().parent), "TORCHAOS_NVML_REAL": "none",
                "TORCHAOS_NVML_CONTROL": scratch,
            }  # fmt: skip
            results[name] = measure(script, events, Path(scratch), env)
    for name, taken in results.items():
        p50, p99 = taken[len(taken) // 2], taken[int(0.99 * len(taken))]
        print(f"{name:10} {events} events: median {p50:.2f} ms, p99 {p99:.2f} ms, worst {taken[-1]:.2f} ms")
    return int(results["overlay"][int(0.99 * events)] >= 10.0)


if __name__ == "__main__":
    sys.exit(main())
