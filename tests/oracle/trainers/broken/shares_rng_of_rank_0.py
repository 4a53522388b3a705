"""Puts rank 0's random number generators back on every rank: a checkpoint that only rank 0 wrote. From then on all
ranks drop the same units."""

import torch
from base import Trainer, main


class SharesRngOfRank0(Trainer):
    def load_rng(self, state):
        super().load_rng(torch.load(self.newest() / "rank-0.pt", weights_only=False))


main(SharesRngOfRank0)
