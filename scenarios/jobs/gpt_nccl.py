"""The GPT of gpt_ddp.py on gloo, which also calls NVIDIA's own NCCL in each step: for faults in NCCL, without a GPU.

NCCL marks each of its calls by NVTX before it looks at the arguments. An injected fault acts in that mark. The calls
have no communicator, so NCCL refuses them afterwards, and nothing is sent. `pip install nvidia-nccl-cu12` brings the
library."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import gpt
from fault_tolerance import Preemption
from gpt_ddp import replicate
from torch import Tensor

SIZES = (1_000, 100_000)  # elements of 4 bytes
FLOAT32, SUM = 7, 0  # ncclDataType_t, ncclRedOp_t


def library() -> ctypes.CDLL:
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package and package.submodule_search_locations else ():
        for found in Path(folder).glob("nccl/lib/libnccl.so.2"):
            return ctypes.CDLL(str(found))
    sys.exit("gpt_nccl.py: there is no libnccl.so.2; pip install nvidia-nccl-cu12")


def call_all(nccl: ctypes.CDLL) -> None:
    nothing = ctypes.c_void_p(None)
    for size in map(ctypes.c_size_t, SIZES):
        nccl.ncclAllReduce(nothing, nothing, size, FLOAT32, SUM, nothing, nothing)
        nccl.ncclAllGather(nothing, nothing, size, FLOAT32, nothing, nothing)
        nccl.ncclReduceScatter(nothing, nothing, size, FLOAT32, SUM, nothing, nothing)
        nccl.ncclBroadcast(nothing, nothing, size, FLOAT32, 0, nothing, nothing)
        nccl.ncclReduce(nothing, nothing, size, FLOAT32, SUM, 0, nothing, nothing)
        nccl.ncclSend(nothing, size, FLOAT32, 0, nothing, nothing)
        nccl.ncclRecv(nothing, size, FLOAT32, 0, nothing, nothing)


class Run(gpt.Run):
    nccl = library()

    def step(self, text: Tensor, notice: Preemption) -> tuple[float, bool, bool]:
        call_all(self.nccl)
        return super().step(text, notice)


if __name__ == "__main__":
    gpt.Run = Run  # type: ignore[misc]
    gpt.train(replicate)
