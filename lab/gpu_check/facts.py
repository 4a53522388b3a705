"""Prints what this machine is, a fact a line: for the head of the table. The last line is JSON: `env`, by which the
rows need not ask torch again, and `versions` for the records, null without a GPU."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from pathlib import Path

from row import loaded

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main() -> None:
    print(datetime.date.today().isoformat())
    print(f"Python {platform.python_version()}, {os.cpu_count()} processors, Linux {platform.release()}")
    if os.environ["GPU_CHECK_CPU"] == "1":
        print("A REHEARSAL on the CPU, with gloo: no row says anything about a GPU")
    gpus = 0
    if torch is None:
        print("torch is missing")
    else:
        print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        print("no GPU")
        print(json.dumps({"env": {"GPU_CHECK_GPUS": "0"} if torch else {}, "versions": None}))
        return
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    print(f"{len(names)} GPU: {', '.join(names)}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"NCCL {nccl} ({loaded('libnccl') or 'its file is not known'}), driver {driver()}")
    print(f"noise floor: {noise()}")
    versions = {
        "card": names[0], "driver": driver(), "nccl": nccl,
        "torch": torch.__version__, "date": datetime.date.today().isoformat(), "commit": commit(),
    }  # fmt: skip
    env = {
        "GPU_CHECK_GPUS": str(gpus), "GPU_CHECK_NCCL": loaded("libnccl"),
        "GPU_CHECK_ONES": str(torch.ones(4, device="cuda").tolist()),
    }  # fmt: skip
    print(json.dumps({"env": env, "versions": versions}))


def commit() -> str:
    """The commit of the repository, as far as git tells."""
    here = Path(__file__).parent
    ask = ["git", "-C", str(here), "-c", f"safe.directory={here.parents[1]}", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def noise() -> str:
    """How much the time of the same work on the GPU varies: 50 products of matrices of 4096 x 4096 in bfloat16."""
    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    times, end_s = list[float](), time.perf_counter() + 3
    while len(times) < 60:
        begun = time.perf_counter()
        if begun > end_s:
            return "not measured, the products are too slow"
        one @ one
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    times = sorted(times[10:])
    return f"{times[25]:.3f} ms in the median, {times[2]:.3f} to {times[47]:.3f} ms in nine tenths of 50"


def driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:
        return f"not known: pynvml: {error}"


if __name__ == "__main__":
    main()
