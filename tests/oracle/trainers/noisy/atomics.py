"""Healthy, with sums that come out differently each time in the last bits, as atomic additions on a GPU do."""

import os

import torch
from base import Trainer, main


class Atomics(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))

    @staticmethod
    def options(parser):
        parser.add_argument("--noise", type=float, default=1e-7, help="relative, of each element of a gradient")

    def loss(self, model, batch):
        """On each rank, before gradients are averaged: replicas stay equal."""
        loss = super().loss(model, batch)
        return loss * (1 + self.args.noise * torch.randn((), generator=self.noise, dtype=torch.float64)).float()


if __name__ == "__main__":
    main(Atomics)
