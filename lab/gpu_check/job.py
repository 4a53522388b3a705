"""gpt_ddp.py for any number of GPUs: ranks share a GPU if there are too few. Without a GPU it is gpt_ddp.py.

GPU_CHECK_BACKEND says how CUDA tensors are reduced, see row.py. With GPU_CHECK_NOISE=1, algorithms need not be
deterministic."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from importlib.resources import files

sys.path.insert(0, str(files("torchaos.scenarios") / "jobs"))

import gpt
import torch
import torch.distributed as dist
from gpt_ddp import replicate
from row import share_a_gpu

on_cpu = gpt.start


def end_soon_after_sigterm() -> None:
    """gpt.py remembers SIGTERM until its step is over. While it waits in a call of CUDA or NCCL, Python runs no
    handler, and torchrun would wait for 30 s. So a thread ends the rank after eight."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)  # written by the interpreter's own handler in C, at once

    def wait() -> None:
        while os.read(heard, 1)[0] != signal.SIGTERM:
            pass
        time.sleep(8)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def start(timeout: timedelta) -> torch.device:
    if not torch.cuda.is_available():
        return on_cpu(timeout)
    backend = os.environ.get("GPU_CHECK_BACKEND", "nccl")
    # Otherwise torch lets a rank that has seen an error of NCCL wait for a minute, until all ranks have written dumps.
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    share_a_gpu(backend)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(os.environ.get("GPU_CHECK_NOISE") != "1")
    end_soon_after_sigterm()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(f"cpu:gloo,cuda:{backend.partition('-')[0]}", timeout=timeout)
    return device


if __name__ == "__main__":
    gpt.start = start
    gpt.train(replicate)
