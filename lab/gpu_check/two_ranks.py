"""How two ranks of this machine can reduce CUDA tensors. NCCL refuses two ranks on one GPU, unless each says that it is
another machine (NCCL_HOSTID), or from 2.30.3 on with NCCL_MULTI_RANK_GPU_ENABLE=1. Else they use gloo. The rows after
this one use the way that was found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta

from row import KEEP, SLOW, gpus, need_gpu, share_a_gpu, torchrun

LIMIT_S = 20 * SLOW
REFUSED = r"Duplicate GPU detected.*|Multiple Ranks are using the same GPU.*"  # until NCCL 2.29, and later


def rank(way: str) -> None:
    import torch
    import torch.distributed as dist

    number = int(os.environ["RANK"])
    torch.cuda.set_device(number % torch.cuda.device_count())
    share_a_gpu(way)
    dist.init_process_group(way.partition("-")[0], timeout=timedelta(seconds=20 * SLOW))
    for size in (1, 1 << 20):
        data = torch.full((size,), float(number + 1)).cuda()
        dist.all_reduce(data)
        assert data.cpu().eq(3.0).all().item(), "the sum is wrong"
    dist.destroy_process_group()
    print("SUM IS RIGHT", flush=True)


def attempt(way: str) -> tuple[bool, str]:
    """Whether it works, and over what NCCL's connections go, or why not."""
    env = {**os.environ, "NCCL_DEBUG": "INFO"}
    try:
        done = torchrun(2, __file__, way, env=env, limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"it was not over after {LIMIT_S:g} s"
    print(f"--- {way}", done.stdout, done.stderr, sep="\n")
    if done.returncode == 0 and done.stdout.count("SUM IS RIGHT") == 2:
        return True, ", ".join(sorted(set(re.findall(r" via (\S+)", done.stdout + done.stderr))))
    both = done.stdout + done.stderr
    said = re.findall(REFUSED, both) or re.findall(r"ncclInvalidUsage.*|Error: .*", both)
    return False, said[0][:160] if said else f"exit code {done.returncode}"


def main() -> int:
    need_gpu()
    told = []
    for way in ("nccl", "nccl-hostid", "nccl-multirank", "gloo"):
        if way in ("nccl-hostid", "nccl-multirank") and gpus() > 1:
            continue
        works, words = attempt(way)
        if works:
            (KEEP / "backend").write_text(way)
            over = f", over {words}" if words else ""
            print("; ".join([*told, f"{way}: two ranks reduce on {min(2, gpus())} GPU{over}"]))
            return 0
        told.append(f"{way}: {words}")
    print("; ".join(told))
    return 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1])
    else:
        sys.exit(main())
