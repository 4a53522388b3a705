"""The GPT of gpt_ddp.py as a pipeline: each rank has some of the layers, and gives what it has computed to the next.

Checkpoints name each layer as in the whole model, so that another number of ranks divides it anew."""

from __future__ import annotations

import argparse
from typing import Any

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import OptimizerState, Preemption
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

gpt.DROPOUT = 0.0  # what it draws would depend on how many ranks there are
gpt.replicas_agree = lambda model, group: True  # type: ignore[attr-defined]  # there are none
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class Whole(gpt.GlobalBatches):
    """Each rank reads the whole batch: the first its inputs, the last what is to be guessed."""

    def share(self, whole: Tensor) -> Tensor:
        return whole


class Give(torch.autograd.Function):
    """To the next rank, from which the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.send(x.contiguous(), dist.get_rank() + 1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> Tensor:
        gradient = torch.empty_like(unused[0])
        dist.recv(gradient, dist.get_rank() + 1)
        return gradient


class Take(torch.autograd.Function):
    """From the rank before, to which the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.recv(x, dist.get_rank() - 1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        dist.send(gradient[0].contiguous(), dist.get_rank() - 1)
        return gradient[0]


class Stage(gpt.GPT):
    """This rank's layers, with the names that they have in the whole model."""

    def __init__(self, whole: gpt.GPT) -> None:
        nn.Module.__init__(self)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        each = -(-gpt.LAYERS // ranks)
        self.first, self.last = rank == 0, rank == ranks - 1
        own = {str(number): block for number, block in enumerate(whole.blocks) if number // each == rank}
        self.blocks = nn.ModuleDict(own)  # type: ignore[assignment]
        if self.first:
            self.token, self.place = whole.token, whole.place
        if self.last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, text: Tensor) -> Tensor:
        """The last rank: the loss. The others: what they gave to the next one."""
        if self.first:
            x = self.embed(text)
        else:
            there = torch.empty(len(text), gpt.CONTEXT, gpt.WIDTH, requires_grad=True)
            x = Take.apply(there)  # type: ignore[no-untyped-call]
        for block in self.blocks.children():
            x = block(x)
        given: Tensor = self.loss(x, text) if self.last else Give.apply(x)  # type: ignore[no-untyped-call]
        return given


class OfStages(OptimizerState):
    """Each parameter has its own entries, also for the settings, which ranks would otherwise share."""

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=BY_NAME))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=BY_NAME)


class Run(gpt.Run):
    def __init__(self, args: argparse.Namespace, parallel: gpt.Parallel, device: torch.device) -> None:
        super().__init__(args, parallel, device)
        self.parts["optimizer"] = OfStages(self.model, self.optimizer)
        del self.parts["guard"]

    def step(self, text: Tensor, notice: Preemption) -> tuple[float, bool, bool]:
        loss = self.model(text)
        loss.backward(torch.ones_like(loss))
        squares = [part.grad.square().sum() for part in self.model.parameters() if part.grad is not None]
        own = torch.stack([torch.stack(squares).sum(), loss.detach() if loss.dim() == 0 else torch.zeros(())])
        news = torch.cat([own, torch.tensor([float(notice.leave), float(notice.save)])])
        dist.all_reduce(news)
        for part in self.model.parameters():
            if part.grad is not None:
                part.grad *= min(1.0, gpt.MAX_NORM / (news[0].sqrt().item() + 1e-6))  # of all ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.sampler.position += 1
        self.begin(self.done + 1)
        return news[1].item(), bool(news[2]), bool(news[3])


def divide(model: nn.Module, device: torch.device) -> nn.Module:
    assert isinstance(model, gpt.GPT)
    return Stage(model)


if __name__ == "__main__":
    gpt.Run, gpt.GlobalBatches = Run, Whole  # type: ignore[misc]
    gpt.train(divide)
