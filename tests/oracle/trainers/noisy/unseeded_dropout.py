"""Healthy, with dropout from a generator that nobody seeded: no two runs have one loss in common."""

import torch
from base import Trainer, main


class UnseededDropout(Trainer):
    def __init__(self, args):
        super().__init__(args)
        torch.seed()


main(UnseededDropout)
