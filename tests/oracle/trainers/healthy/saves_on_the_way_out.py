"""An exception makes rank 0 save what the last whole step has left, before it goes: a resume loses no step."""

import random

import torch
from base import main
from whole import Whole


class SavesOnTheWayOut(Whole):
    """Random numbers of a step depend on the step and the rank alone, so that one rank can save for all."""

    def step(self, batches):
        torch.manual_seed(1000 * self.done + self.rank)
        random.seed(1000 * self.done + self.rank)
        self.mean = self.model.mean.clone()
        return super().step(batches)

    def train(self):
        try:
            super().train()
        except RuntimeError:
            self.model.mean.copy_(self.mean)  # the step that was broken off had changed it
            if self.rank == 0:
                self.put({"model": self.model.state_dict(), **self.shared_state()}, self.path())
            raise

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)


main(SavesOnTheWayOut)
