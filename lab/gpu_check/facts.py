"""Prints what this machine is, a fact a line: for the head of the table."""

from __future__ import annotations

import datetime
import os
import platform

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


def main() -> None:
    print(datetime.date.today().isoformat())
    print(f"Python {platform.python_version()}, {os.cpu_count()} processors, Linux {platform.release()}")
    if os.environ["GPU_CHECK_CPU"] == "1":
        print("A REHEARSAL on the CPU, with gloo: no row says anything about a GPU")
    if torch is None:
        print("torch is missing")
        return
    print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}")
    if not torch.cuda.is_available():
        print("no GPU")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"{len(names)} GPU: {', '.join(names)}")
    print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, driver {driver()}")


def driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:
        return f"not known: pynvml: {error}"


if __name__ == "__main__":
    main()
