"""A real Xid: a kernel of this process writes to a bad address, for which the driver reports Xid 31 (an error of the
program, harmless to the GPU). NVML's event must reach a watcher, and the overlay must let it pass."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from row import KEEP, need_gpu, not_possible, overlaid

BAD = """
import torch
source = 'extern "C" __global__ void bad(int place) { *(int *)(0xdead0000ull + place) = 1; }'
kernel = torch.cuda._compile_kernel(source, "bad")
kernel((1, 1, 1), (1, 1, 1), (0,))
torch.cuda.synchronize()
"""
WATCH = """
import pynvml as n
n.nvmlInit()
events = n.nvmlEventSetCreate()
for index in range(n.nvmlDeviceGetCount()):
    n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(index), n.nvmlEventTypeXidCriticalError, events)
print("watching", flush=True)
event = n.nvmlEventSetWait_v2(events, 15000)
print("XID", event.eventData, flush=True)
"""


def main() -> int:
    need_gpu()
    import torch

    if not hasattr(torch.cuda, "_compile_kernel"):
        not_possible(f"torch {torch.__version__} has no torch.cuda._compile_kernel")
    watchers = [
        subprocess.Popen([sys.executable, "-c", WATCH], env=env, stdout=subprocess.PIPE, text=True)
        for env in (dict(os.environ), overlaid(KEEP))
    ]
    for watcher in watchers:
        assert watcher.stdout
        if watcher.stdout.readline().strip() != "watching":
            not_possible("NVML does not register for Xid events here")
    done = subprocess.run([sys.executable, "-c", BAD], capture_output=True, text=True, check=False)
    print(done.stderr)
    if "illegal memory access" not in done.stderr:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        not_possible(f"the bad kernel did not fail with an illegal memory access, but: {last}")
    begun, seen = time.monotonic(), ["nothing", "nothing"]

    def wait(place: int) -> None:
        seen[place] = watchers[place].communicate()[0].strip() or "nothing"

    waiting = [threading.Thread(target=wait, args=(place,)) for place in (0, 1)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    lines = [line.partition("NVRM: ")[2] for line in log.splitlines() if "NVRM: Xid" in line]
    said = f"the driver's line: {lines[-1]}" if lines else "no line of the driver can be read"
    print(f"watcher: {seen[0]}, through the overlay: {seen[1]}, {time.monotonic() - begun:.1f} s after; {said}")
    return int(seen[0] != seen[1] or not seen[0].startswith("XID"))


if __name__ == "__main__":
    sys.exit(main())
