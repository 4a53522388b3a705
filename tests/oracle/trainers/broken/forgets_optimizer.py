"""Saves the optimizer's state and never puts it back. PyTorch's own DDP tutorial (multigpu_torchrun.py) has none in
its snapshot at all."""

from base import Trainer, main


class ForgetsOptimizer(Trainer):
    def load_optimizer(self, state):
        pass


main(ForgetsOptimizer)
