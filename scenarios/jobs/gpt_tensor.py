"""The GPT of gpt_ddp.py with tensor parallelism: the ranks share out the two matrices of each MLP, and all have the
whole of everything else. Checkpoints hold whole matrices, so that another number of ranks shares them out anew."""

from __future__ import annotations

import argparse

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import Preemption
from gpt_pipeline import Whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

gpt.DROPOUT = 0.0  # it would have to be equal on all ranks
gpt.replicas_agree = lambda model, group: True  # type: ignore[attr-defined]  # of the parts there are none


class Run(gpt.Run):
    def __init__(self, args: argparse.Namespace, parallel: gpt.Parallel, device: torch.device) -> None:
        super().__init__(args, parallel, device)
        del self.parts["guard"]

    def step(self, text: Tensor, notice: Preemption) -> tuple[float, bool, bool]:
        loss = self.model(text)
        loss.backward()
        gradients = [part.grad for part in self.model.parameters() if part.grad is not None]
        norm = torch.stack([whole(gradient.square().sum()) for gradient in gradients]).sum().sqrt().item()
        news = torch.tensor([float(notice.leave), float(notice.save)])
        dist.all_reduce(news)
        for gradient in gradients:
            gradient *= min(1.0, gpt.MAX_NORM / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.sampler.position += 1
        self.begin(self.done + 1)
        return loss.item(), bool(news[0]), bool(news[1])


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def share_out(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    return model


if __name__ == "__main__":
    gpt.Run, gpt.GlobalBatches = Run, Whole  # type: ignore[misc]
    gpt.train(share_out)
