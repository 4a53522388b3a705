"""The GPT of gpt_ddp.py, trained by DiLoCo (arXiv 2311.08105): each rank trains by itself, and every MEET_EVERY steps
the mean of what they have learned is a step of an outer optimizer, from which all go on.

The inner optimizer and the guard are those of a rank, and the outer momentum is that of all. A checkpoint is taken at a
meeting, where all ranks have the same weights."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import Preemption
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

MEET_EVERY, OUTER_RATE, OUTER_MOMENTUM = 5, 0.7, 0.9


class OfThisRank:
    """A part that each rank has for itself."""

    def __init__(self, part: Stateful) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        return {f"rank{dist.get_rank()}": self.part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part.load_state_dict(state[f"rank{dist.get_rank()}"])


class Outer:
    """SGD with Nesterov momentum, on what all ranks had at the last meeting."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.momentum = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
        self.remember()

    def remember(self) -> None:
        self.common = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def meet(self) -> None:
        """What the ranks learned since the last meeting becomes one step. All ranks call this."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                moved = self.mean(self.common[name] - weight)
                self.momentum[name].mul_(OUTER_MOMENTUM).add_(moved)
                weight.copy_(self.common[name] - OUTER_RATE * (moved + OUTER_MOMENTUM * self.momentum[name]))
        self.remember()

    def mean(self, moved: Tensor) -> Tensor:
        dist.all_reduce(moved)
        return moved / dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.momentum)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The weights are loaded before."""
        for name, value in state.items():
            self.momentum[name].copy_(value)
        self.remember()


class Run(gpt.Run):
    def __init__(self, args: argparse.Namespace, parallel: gpt.Parallel, device: torch.device) -> None:
        super().__init__(args, parallel, device)
        if args.checkpoint_every % MEET_EVERY or args.steps % MEET_EVERY:
            sys.exit(f"--steps and --checkpoint-every must be multiples of {MEET_EVERY}: the ranks meet then")
        self.outer = Outer(self.model)
        self.parts |= {name: OfThisRank(self.parts[name]) for name in ("optimizer", "guard")}
        self.parts["outer"] = self.outer

    def step(self, text: Tensor, notice: Preemption) -> tuple[float, bool, bool]:
        loss, leave, save = super().step(text, notice)
        meets = self.done % MEET_EVERY == 0
        if meets:
            self.outer.meet()
        notice.leave, notice.save = leave and not meets, save and not meets  # both wait for a meeting
        return loss, leave and meets, save and meets


def alone(model: nn.Module, device: torch.device) -> nn.Module:
    """No exchange of gradients."""
    return model


if __name__ == "__main__":
    gpt.Run = Run  # type: ignore[misc]
    gpt.train(alone)
