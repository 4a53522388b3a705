"""Computes something with a known answer on each GPU of this node (a rank: on its own), or on its CPU if it has none.
The exit code is WRONG if an answer is wrong: some faults of a device are reported by nobody. Plain PyTorch; copy it."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

WRONG = 86  # exit code; health_agent.py knows it, too
SIZE, TIMES = 256, 4
BYTES = 1 << 24


def problem(device: torch.device) -> str | None:
    """What is wrong with the device. None if nothing is."""
    for pattern in (0x00, 0xFF, 0x55, 0xAA):
        memory = torch.full((BYTES,), pattern, dtype=torch.uint8, device=device)
        if wrong := int((memory != pattern).sum()):
            return f"{wrong} of {BYTES} bytes do not keep {pattern:#04x}"
    for number in range(TIMES):
        whole = torch.randint(-1, 2, (2, SIZE, SIZE), generator=torch.Generator().manual_seed(number))
        known = whole[0] @ whole[1]  # of integers, on the CPU; up to 256, which bfloat16 holds exactly
        for dtype in (torch.float32, torch.bfloat16):
            left, right = whole.to(device, dtype)
            layer = nn.Linear(SIZE, SIZE, bias=False, device=device, dtype=dtype)
            with torch.no_grad():
                layer.weight.copy_(right.T)
                product = layer(left)
            if wrong := int((product.cpu() != known).sum()):
                return f"{wrong} of {SIZE * SIZE} entries of a product are wrong ({dtype})"
    return None


def main() -> int:
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if own := os.environ.get("LOCAL_RANK"):
        gpus = gpus[int(own) :][:1]
    found = {device: why for device in gpus or [torch.device("cpu")] if (why := problem(device))}
    for device, why in found.items():
        print(f"self-test: {device}: {why}", flush=True)
    return WRONG if found else 0


if __name__ == "__main__":
    sys.exit(main())
