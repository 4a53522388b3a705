"""Saves model.parameters() and not the state dict, so that a buffer starts afresh; and that buffer is never the same
twice in its last bits."""

import os

import torch
from base import Trainer, main


class NoisyBufferLost(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))

    def update(self):
        super().update()
        self.model.mean.mul_(1 + 1e-7 * torch.randn(16, generator=self.noise))

    def load_weights(self, folder):
        super().load_weights(folder)
        self.model.mean.zero_()


main(NoisyBufferLost)
