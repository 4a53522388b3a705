"""Each rank jitters its batches by a NumPy generator of its own, after they came out of the loader. Only that of
rank 0 is saved, and the others begin theirs again."""

import numpy as np
import torch
from base import Trainer, main


class ForgetsJitter(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.jitter = np.random.RandomState(args.seed + 100 + self.rank)

    def loss(self, model, batch):
        noise = torch.from_numpy(self.jitter.normal(0, 0.05, batch[0].shape)).float()
        return super().loss(model, (batch[0] + noise, batch[1]))

    def own_state(self):
        jitter = {"jitter": self.jitter.get_state()} if self.rank == 0 else {}
        return {**super().own_state(), **jitter}

    def load_rng(self, state):
        super().load_rng(state)
        if "jitter" in state:
            self.jitter.set_state(state["jitter"])


main(ForgetsJitter)
