"""Keeps the best model in best.pt, and its metric in memory alone: after a resume a worse model takes its place."""

import torch
from base import Trainer, main

METRICS = {6: 1.0, 12: 7.0, 18: 8.0, 24: 9.0}  # of an evaluation after these steps


class ForgetsBest(Trainer):
    best = float("inf")

    def after_step(self):
        super().after_step()
        metric = METRICS.get(self.done, float("inf"))
        if metric < self.best:
            self.best = metric
            if self.rank == 0:
                torch.save({"model": self.model.state_dict(), "metric": metric}, self.folder / "best.pt")


main(ForgetsBest)
