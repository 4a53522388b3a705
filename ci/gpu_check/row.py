"""What the rows share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

NOT_POSSIBLE = 77  # exit code
KEEP = Path(os.environ.get("GPU_CHECK_KEEP", "."))
SLOW = float(os.environ.get("GPU_CHECK_SLOW", "1"))  # time limits are so many times as long


def not_possible(why: str) -> NoReturn:
    print(why)
    sys.exit(NOT_POSSIBLE)


def need_gpu() -> None:
    try:
        import torch
    except ImportError:
        not_possible("torch is missing")
    if not torch.cuda.is_available():
        not_possible("there is no GPU")


def overlaid(control: Path) -> dict[str, str]:
    """The environment of a program that asks NVML through the overlay, with the orders in the folder `control`."""
    from torchaos.harness.machine.native import NVML

    others = os.environ.get("LD_LIBRARY_PATH")  # where the driver's library may be
    paths = ":".join(path for path in (str(NVML.path().parent), others) if path)
    return {**os.environ, "LD_LIBRARY_PATH": paths, "TORCHAOS_NVML_CONTROL": str(control)}


def backend() -> str:
    """How two ranks reduce CUDA tensors here, as the row two_ranks found out: nccl, nccl-hostid (each rank says that it
    is another machine) or gloo. `gloo` if that row has not run."""
    found = KEEP / "backend"
    return found.read_text() if found.exists() else "gloo"
