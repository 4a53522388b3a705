"""The GPT of gpt_ddp.py, restarted within its processes (the in-process restart of NVIDIA's resiliency extension): if a
rank raises an exception, training ends on all ranks, and begins again from the newest checkpoint, in the same
processes."""

import os
import sys
from datetime import timedelta

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import watch
from gpt_ddp import replicate
from torch._C._distributed_c10d import PrefixStore, TCPStore

try:
    from nvidia_resiliency_ext.inprocess import CallWrapper, FrozenState, Wrapper
    from nvidia_resiliency_ext.inprocess.abort import Abort
except ImportError:
    sys.exit("gpt_in_process.py: a package is missing: pip install nvidia-resiliency-ext")


def begin(call: CallWrapper) -> None:
    """Join the process group of this iteration, by a store that all iterations share."""

    def start(timeout: timedelta) -> torch.device:
        torch.set_num_threads(1)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # there the wrapper has a store, too
        whole = TCPStore(host, port, is_master=False, timeout=timeout)
        store = PrefixStore(f"iteration-{call.iteration}", whole)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        return torch.device("cpu")

    gpt.start = start


class AbortGloo(Abort):  # type: ignore[misc]
    """Leaves the process groups, as the extension's own class does with those of NCCL. gloo wakes no rank that waits
    for another: such a rank waits for the time-out, and its own watch must not end it meanwhile."""

    def __call__(self, state: FrozenState) -> FrozenState:
        watch(None)
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_names):
                group.abort()
            dist.destroy_process_group()
        return state


@Wrapper(  # type: ignore[untyped-decorator]
    abort=AbortGloo(),
    soft_timeout=timedelta(seconds=120),
    hard_timeout=timedelta(seconds=150),
    barrier_timeout=timedelta(seconds=180),
)
def train(call: CallWrapper = None) -> None:  # the wrapper finds it by its type, and fills it
    begin(call)
    gpt.train(replicate)


if __name__ == "__main__":
    train()
