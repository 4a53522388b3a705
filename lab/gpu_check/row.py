"""What the rows share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

NOT_POSSIBLE = 77  # exit code
KEEP = Path(os.environ.get("GPU_CHECK_KEEP", "."))
SLOW = float(os.environ.get("GPU_CHECK_SLOW", "1"))  # time limits are so many times as long


def not_possible(why: str) -> NoReturn:
    print(why)
    sys.exit(NOT_POSSIBLE)


def gpus() -> int:
    """How many GPUs torch sees. facts.py has found it out, as torch takes seconds to import."""
    if known := os.environ.get("GPU_CHECK_GPUS"):
        return int(known)
    try:
        import torch
    except ImportError:
        not_possible("torch is missing")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def need_gpu() -> None:
    if not gpus():
        not_possible("there is no GPU")


def need_kernels() -> None:
    """For a row whose numbers matter: a simulated GPU may take all kernels and run none."""
    found = os.environ.get("GPU_CHECK_ONES")
    if found is None:
        import torch

        found = str(torch.ones(4, device="cuda").tolist())
    if found != str([1.0] * 4):
        not_possible(f"this GPU does not compute: torch.ones(4, device='cuda') is {found}")


def need_two_ranks_with_nccl() -> None:
    if not backend().startswith("nccl"):
        not_possible(f"two ranks have no NCCL here, they reduce by {backend()}")


def need_nccl_to_read(variable: str) -> None:
    """For a row that needs a library which NCCL loads, named by an environment variable. An NCCL that reads the
    variable contains its name; a simulated one may not."""
    path = os.environ.get("GPU_CHECK_NCCL")
    if path is None:
        import torch

        assert torch.cuda.is_available()
        path = loaded("libnccl")
    if path and variable.encode() not in Path(path).read_bytes():
        not_possible(f"this NCCL does not read {variable}: {path}")


def loaded(name: str) -> str:
    """The file of a library, as this process has loaded it. Empty if it has not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if name in line), "")


def torchrun(ranks: int, *words: str, env: dict[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a program under torchrun. Raises TimeoutExpired if it is not over in time, after its ranks are ended too."""
    # With this address, the name of a machine without a network need not be known to it.
    here = ("--standalone", "--local-addr", "127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node", str(ranks), *words]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, complained = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun passes it on
        print(*job.communicate(), sep="\n")
        raise
    return subprocess.CompletedProcess(command, job.returncode, said, complained)


def why(done: subprocess.CompletedProcess[str]) -> str:
    """The first exception in what a program said, or else its last line."""
    found = re.search(r"^(?:\[rank\d+\]: *)?([\w.]*Error\b.*)", f"{done.stdout}\n{done.stderr}", re.MULTILINE)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return (found[1] if found else last)[:300]


def overlaid(control: Path) -> dict[str, str]:
    """The environment of a program that asks NVML through the overlay, with the orders in the folder `control`."""
    from torchaos.harness.host.native_libraries import NVML

    paths = ":".join(path for path in (str(NVML.path().parent), os.environ.get("LD_LIBRARY_PATH")) if path)
    # A library of the same name that is preloaded, as by a substitute for a GPU, would be asked in its place.
    preloaded = (path for path in os.environ.get("LD_PRELOAD", "").split(":") if "libnvidia-ml" not in path)
    ours = {"LD_LIBRARY_PATH": paths, "LD_PRELOAD": ":".join(preloaded), "TORCHAOS_NVML_CONTROL": str(control)}
    return {**os.environ, **ours, **driver_library()}


def driver_library() -> dict[str, str]:
    """Tells the overlay where the driver's NVML is, as a program without the overlay finds it: it may be in a folder
    that the overlay does not look into. Empty without a driver."""
    asks = "import pynvml; pynvml.nvmlInit(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False).stdout
    found = [line.split()[-1] for line in maps.splitlines() if "libnvidia-ml" in line]
    return {"TORCHAOS_NVML_REAL": found[0]} if found else {}


def backend() -> str:
    """How two ranks reduce CUDA tensors here, as the row two_ranks found out: nccl, nccl-hostid (each rank says that it
    is another machine), nccl-multirank (NCCL lets ranks share a GPU) or gloo. `gloo` if that row has not run."""
    found = KEEP / "backend"
    return found.read_text() if found.exists() else "gloo"


def share_a_gpu(way: str) -> None:
    """Sets what NCCL needs in this rank, so that it may share its GPU in the way that was found."""
    if way == "nccl-hostid":
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    if way == "nccl-multirank":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30.3 and later
