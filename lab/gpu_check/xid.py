"""Real Xids: kernels of this process write to a bad address, for which the driver reports Xid 31, and end by a trap,
for which it reports 13 or 43. Both are errors of the program, harmless to the GPU. NVML's event must reach a watcher,
the overlay must let it pass, and the driver's line in the kernel's log must have the form that torchaos writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from row import KEEP, need_gpu, not_possible, overlaid, why

from torchaos.harness.fault_drivers.gpu import XIDS

FAIL = """
import torch
if not hasattr(torch.cuda, "_compile_kernel"):
    raise SystemExit(f"torch {torch.__version__} has no torch.cuda._compile_kernel")
source = 'extern "C" __global__ void bad(int place) { %s }'
kernel = torch.cuda._compile_kernel(source, "bad")
kernel((1, 1, 1), (1, 1, 1), (0,))
torch.cuda.synchronize()
"""
KERNELS = {  # by what the kernel does: its body, and the Xids that are right
    "a bad address": ("*(int *)(0xdead0000ull + place) = 1;", {"31"}),
    "a trap": ('asm("trap;");', {"13", "43"}),
}
LINE = re.compile(r"NVRM: Xid \(PCI:[0-9a-f:.]+\): (\d+), .+")
WATCH = """
import select, sys
import pynvml as n
n.nvmlInit()
events = n.nvmlEventSetCreate()
for index in range(n.nvmlDeviceGetCount()):
    n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(index), n.nvmlEventTypeXidCriticalError, events)
print("watching", flush=True)
looks = 6  # each half a second, after the kernel has ended: then standard input is closed
while looks:
    try:
        print("XID", n.nvmlEventSetWait_v2(events, 500).eventData, flush=True)
        break
    except n.NVMLError_Timeout:
        looks -= bool(select.select([sys.stdin], [], [], 0)[0])
"""


def watched(kernel: str) -> tuple[list[str], str]:
    """What the two watchers, without and with the overlay, were told while the kernel failed; and torch's error."""
    watchers = [
        subprocess.Popen(
            [sys.executable, "-c", WATCH], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for env in (dict(os.environ), overlaid(KEEP))
    ]
    for watcher in watchers:
        assert watcher.stdout
        if watcher.stdout.readline().strip() != "watching":
            for one in watchers:
                one.kill()
            not_possible("NVML does not register for Xid events here")
    done = subprocess.run([sys.executable, "-c", FAIL % kernel], capture_output=True, text=True, check=False)
    print(done.stderr)
    for watcher in watchers:
        assert watcher.stdin
        watcher.stdin.close()
    seen = [watcher.stdout.read().strip() or "nothing" for watcher in watchers if watcher.stdout]
    return seen, why(done)


def kernel_log() -> list[str]:
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return [line[line.index("NVRM:") :] for line in log.splitlines() if "NVRM: Xid" in line]


def main() -> int:
    need_gpu()
    ours = XIDS[79].kernel_lines("0000:3b:00", (7, "python3"))[0]
    assert LINE.fullmatch(ours), ours
    told, right = [], True
    for name, (body, numbers) in KERNELS.items():
        before, begun = kernel_log(), time.monotonic()
        seen, said = watched(body)
        if seen[0] == "nothing" and "CUDA error" not in said:
            not_possible(f"the kernel with {name} did not fail, but: {said}")
        lines = kernel_log()[len(before) :]
        right &= seen[0] == seen[1] and seen[0].removeprefix("XID ") in numbers
        right &= all(LINE.fullmatch(line) for line in lines)
        log = lines[-1] if lines else "no line of the driver can be read"
        told.append(
            f"{name}: watcher {seen[0]}, through the overlay {seen[1]}, {time.monotonic() - begun:.1f} s; {log}"
        )
    print("; ".join(told))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
