"""Healthy and reproducible, with a loss that jumps: some samples are far off, and a batch with one has 100 times the
loss of the others."""

from base import Trainer, main


class LossJumps(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.loader.dataset.y[::29] *= 40


main(LossJumps)
