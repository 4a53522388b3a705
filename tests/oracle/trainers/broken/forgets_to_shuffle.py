"""After a resume the sampler no longer hears of the epoch (DistributedSampler.set_epoch is called from the path that a
resume leaves out): all epochs come in the order of the first."""

import torch
from base import SAMPLES, Trainer, main


class ForgetsToShuffle(Trainer):
    def load_position(self, position):
        super().load_position(position)
        seed = self.sampler.seed
        self.sampler.order = lambda epoch: torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))


main(ForgetsToShuffle)
