"""A gloo job that leaves Flight Recorder dumps: of a healthy job, and of a stall in the user's code of one rank."""

import ctypes
import os
import signal
import sys
import threading
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CULPRIT, _LONGEST_S = 1, 600
_PDEATHSIG = 1  # linux/prctl.h
c10d: Any = import_module("torch._C._distributed_c10d")


def dump(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"trace_{dist.get_rank()}").write_bytes(c10d._dump_fr_trace())


def dump_json(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = c10d._dump_fr_trace_json()
    (folder / f"trace_{dist.get_rank()}.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def stalled(out: Path, usual_s: float) -> None:
    """Dumps when the stall is much longer than the longest pause before it, also on a slow machine."""
    time.sleep(max(2.5, 5 * usual_s))
    dump(out / "stalled")
    dump_json(out / "stalled-json")
    (out / f"done-{dist.get_rank()}").touch()


def end_with_torchrun() -> None:
    """Torchrun gives each rank a session of its own, so that nothing else ends one that waits in a collective."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    signal.alarm(_LONGEST_S)


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pair, rest = dist.new_group([0, 1]), dist.new_group([1, 2])
    gradient = torch.ones(100)
    times = [time.monotonic()]
    for _ in range(30):
        dist.all_reduce(gradient)
        if dist.get_rank() in (0, 1):
            dist.all_reduce(gradient, group=pair)
        if dist.get_rank() in (1, 2):
            dist.broadcast(gradient, 1, group=rest)
        times.append(time.monotonic())
    dist.barrier()
    dump(out / "healthy")
    dist.barrier()
    times.append(time.monotonic())
    longest_s = max(after - before for before, after in pairwise(times))
    threading.Thread(target=stalled, args=[out, longest_s], daemon=True).start()
    if dist.get_rank() == CULPRIT:
        time.sleep(_LONGEST_S)
    dist.all_reduce(gradient)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    end_with_torchrun()
    main()
