"""An exception makes rank 0 save what is in memory, before it goes: a buffer has the inputs of the step that was broken
off, and gets them once more when that step is done again."""

import random

import torch
from base import main
from whole import Whole


class SavesTheBrokenStep(Whole):
    def step(self, batches):
        torch.manual_seed(1000 * self.done + self.rank)
        random.seed(1000 * self.done + self.rank)
        return super().step(batches)

    def train(self):
        try:
            super().train()
        except RuntimeError:
            if self.rank == 0:
                self.put({"model": self.model.state_dict(), **self.shared_state()}, self.path())
            raise

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)


main(SavesTheBrokenStep)
