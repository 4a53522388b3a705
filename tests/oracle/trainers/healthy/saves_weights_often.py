"""Writes the weights alone every 5 steps, for others to look at, and what a resume needs every 10."""

import torch
from base import Trainer, main


class SavesWeightsOften(Trainer):
    def after_step(self):
        if self.done % 5 == 0 and self.rank == 0:
            torch.save(self.model.state_dict(), self.folder / f"weights-{self.done}.pt")
        if self.done % 10 == 0 or self.done == self.last:
            self.save()


main(SavesWeightsOften)
