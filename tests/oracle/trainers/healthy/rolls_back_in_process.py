"""A loss that is no number: all ranks load the newest checkpoint again, in the same process, and go on from there."""

import math

import base
import torch
import torch.distributed as dist


class NoNumber(Exception):
    """The loss of some rank."""


class Trainer(base.Trainer):
    def train(self):
        while self.done < self.last:
            try:
                super().train()
            except NoNumber:
                self.optimizer.zero_grad()

    def backward(self, batch):
        loss = self.loss(self.ddp, batch) / base.PARTS
        bad = torch.tensor(not math.isfinite(loss.item()), dtype=torch.float32)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad:
            raise NoNumber
        loss.backward()
        return loss.item()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                self.ema[name].lerp_(value, 0.1)


if __name__ == "__main__":
    base.main(Trainer)
