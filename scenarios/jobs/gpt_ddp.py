"""A small GPT, replicated on every rank: torchrun --nproc-per-node 2 gpt_ddp.py --steps 60 --checkpoint-dir DIR."""

import gpt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    # DDP puts gradients into other buckets after the first step of a process. With three ranks or more, that changes
    # the order in which they are summed, so a restart would change the last bits. With this setting, DDP keeps its
    # buckets.
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)


if __name__ == "__main__":
    gpt.train(replicate)
