"""A small GPT, sharded over all ranks: torchrun --nproc-per-node 2 gpt_fsdp2.py --steps 60 --checkpoint-dir DIR."""

import gpt
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


if __name__ == "__main__":
    gpt.train(shard)
