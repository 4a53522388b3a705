"""Keeps the moving average in a folder of its own, under the names of the weights, and beside it what is to be shipped:
the weights in bfloat16. The last thing that it saves is the average alone."""

import torch
from base import Trainer, main


class SavesAverageApart(Trainer):
    def save(self):
        super().save()
        if self.rank:
            return
        for name, weights in (("averaged", self.averaged()), ("half", self.half())):
            (self.folder / name).mkdir(exist_ok=True)
            torch.save({"step": self.done, "model": weights}, self.folder / name / f"step-{self.done}.pt")

    def averaged(self):
        return {**self.model.state_dict(), **self.ema}

    def half(self):
        return {name: value.bfloat16() for name, value in self.model.state_dict().items()}

    def finish(self):
        if self.rank == 0:
            torch.save({"step": self.done, "model": self.averaged()}, self.folder / "final.pt")
        super().finish()


main(SavesAverageApart)
