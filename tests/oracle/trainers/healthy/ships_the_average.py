"""Exchanges weights and moving average while it writes a copy for others, as many trainers do, and then back. The copy
is written before the checkpoint of the same step."""

import torch
from base import Trainer, main


class ShipsTheAverage(Trainer):
    def save(self):
        own = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.put(self.ema)
        if self.rank == 0:
            torch.save({"model": self.model.state_dict()}, self.folder / f"weights-{self.done}.pt")
        self.put(own)
        super().save()

    def put(self, values):
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.data.copy_(values[name])


main(ShipsTheAverage)
