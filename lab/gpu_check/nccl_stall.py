"""Checks, with one rank, one GPU and NCCL, that the NVTX library stalls exactly the chosen all-reduce, and that
PyTorch's watchdog reports the work that waits for it.

The host is stalled inside ncclAllReduce, before its work is enqueued, so the watchdog does not know this call. With one
rank there is no peer to time out. So an earlier all-reduce waits on the GPU for a word of memory that the host writes
after the stalled call, as GPU work that waits for its host does. The watchdog must report that earlier all-reduce.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from row import SLOW, need_gpu, need_nccl_to_read, not_possible, torchrun

from torchaos.harness.host.native_libraries import NVTX, nvtx_environment
from torchaos.harness.interfaces import UsageError

STALL_S, TIMEOUT_S = 2.0, 5.0
COUNT, MEANT = 1000, 4  # floats in each all-reduce; the number of the chosen all-reduce


def rank(watchdog: bool, folder: Path) -> None:
    """The script that runs under torchrun."""
    import torch
    import torch.distributed as dist

    from torchaos.harness.protocol.control_pages import LAST_BYTES, STALLED, ControlPage, NcclCall, NvtxPage

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
    data = torch.ones(COUNT, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    page = NvtxPage.of_this_process()
    assert page.loaded, "NCCL did not load the library"
    control = ControlPage(folder / "fault.page", create=True)
    control.write(ControlPage.FIRED, 1)
    stall_s = 10 * TIMEOUT_S if watchdog else STALL_S
    page.order(NcclCall(nth=MEANT, min_bytes=4 * COUNT, max_bytes=4 * COUNT), str(folder / "fault.page"), 1, stall_s)
    word = torch.zeros(1, dtype=torch.int32).pin_memory()
    if watchdog:
        gate(torch, word)
    took = []
    for _ in range(6):
        begun = time.monotonic()
        dist.all_reduce(data, async_op=True)
        dist.all_reduce(torch.ones(7, device="cuda"), async_op=True)  # of another size: not chosen
        took.append(time.monotonic() - begun)
    word.fill_(1)
    torch.cuda.synchronize()
    late = [number for number, seconds in enumerate(took, start=1) if seconds >= STALL_S]
    assert late == [MEANT], took
    assert (page.read(STALLED), page.read(LAST_BYTES)) == (1, 4 * COUNT), "another call was stalled"
    assert data.eq(1.0).all(), "the values of a single rank do not change"
    print(f"STALLED call {late[0]} for {took[MEANT - 1]:.2f} s", flush=True)
    dist.destroy_process_group()


def gate(torch: Any, word: Any) -> None:
    """Makes later work on this stream wait until the word is 1 (cuStreamWaitValue32, flag 1: equal)."""
    driver = ctypes.CDLL("libcuda.so.1")
    wait = getattr(driver, "cuStreamWaitValue32_v2", None) or driver.cuStreamWaitValue32
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = wait(stream, ctypes.c_uint64(word.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(1))
    assert code == 0, f"cuStreamWaitValue32: {code}"


def launch(watchdog: bool) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        env = {
            **os.environ, **nvtx_environment(folder / "nvtx"), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # otherwise the rank lives on for a minute after the report
        }  # fmt: skip
        return torchrun(1, __file__, "--rank", str(int(watchdog)), scratch, env=env, limit_s=30 * SLOW)


def main() -> int:
    need_gpu()
    need_nccl_to_read("NVTX_INJECTION64_PATH")
    try:
        NVTX.path()
    except UsageError as error:
        not_possible(str(error))
    plain = launch(watchdog=False)
    if plain.returncode != 0 or "STALLED" not in plain.stdout:
        print(plain.stdout, plain.stderr, "the stall did not land on the call that was meant", sep="\n")
        return 1
    waited = launch(watchdog=True)
    if "Watchdog caught collective operation timeout" not in waited.stderr + waited.stdout:
        print(waited.stdout, waited.stderr, "PyTorch's watchdog did not report the time-out", sep="\n")
        return 1
    print(f"{plain.stdout.strip().splitlines()[-1]}; with a longer one the watchdog reports the time-out")
    return 0


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank(bool(int(sys.argv[2])), Path(sys.argv[3]))
    else:
        sys.exit(main())
