"""Trains a small GPT, replicated on every rank: torchrun --nproc-per-node 2 gpt_ddp.py --steps 60 --checkpoint-dir DIR."""

import gpt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


if __name__ == "__main__":
    gpt.train(replicate)
