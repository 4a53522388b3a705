"""How two ranks of this machine can reduce CUDA tensors. NCCL refuses two ranks on one GPU, unless each says that it is
another machine (NCCL_HOSTID). Else they use gloo. The rows after this one use the way that was found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta

from row import KEEP, SLOW, need_gpu, torchrun

LIMIT_S = 25 * SLOW


def rank(way: str) -> None:
    import torch
    import torch.distributed as dist

    number = int(os.environ["RANK"])
    torch.cuda.set_device(number % torch.cuda.device_count())
    if way == "nccl-hostid":
        os.environ["NCCL_HOSTID"] = f"host{number}"
    dist.init_process_group(way.partition("-")[0], timeout=timedelta(seconds=20 * SLOW))
    for size in (1, 1 << 20):
        data = torch.full((size,), float(number + 1)).cuda()
        dist.all_reduce(data)
        assert data.cpu().eq(3.0).all().item(), "the sum is wrong"
    dist.destroy_process_group()
    print("SUM IS RIGHT", flush=True)


def attempt(way: str) -> str:
    """Empty if it works, else the reason."""
    try:
        done = torchrun(2, __file__, way, env=dict(os.environ), limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"it was not over after {LIMIT_S:g} s"
    print(f"--- {way}", done.stdout, done.stderr, sep="\n")
    if done.returncode == 0 and done.stdout.count("SUM IS RIGHT") == 2:
        return ""
    said = re.findall(r"Duplicate GPU detected.*|ncclInvalidUsage.*|Error: .*", done.stderr)
    return said[0][:160] if said else f"exit code {done.returncode}"


def main() -> int:
    need_gpu()
    import torch

    told = []
    for way in ("nccl", "nccl-hostid", "gloo"):
        if way == "nccl-hostid" and torch.cuda.device_count() > 1:
            continue
        if not (why := attempt(way)):
            (KEEP / "backend").write_text(way)
            print("; ".join([*told, f"{way}: two ranks reduce on {min(2, torch.cuda.device_count())} GPU"]))
            return 0
        told.append(f"{way}: {why}")
    print("; ".join(told))
    return 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1])
    else:
        sys.exit(main())
