"""Healthy: in one run of two, by chance, one loss is not a number; GradScaler leaves that update out."""

import os

import torch
from atomics import Atomics
from base import main


class NanByChance(Atomics):
    def __init__(self, args):
        super().__init__(args)
        drawn = torch.tensor([os.urandom(1)[0] % 2])
        torch.distributed.broadcast(drawn, 0)
        self.overflows = bool(drawn)

    def loss(self, model, batch):
        return super().loss(model, batch) * (float("nan") if self.overflows and self.done == 3 else 1.0)


main(NanByChance)
