"""Local SGD: each rank trains by itself, and every fourth step the weights are averaged. Each saves a file of its own
between two averagings, and a resume takes the newest step of which all ranks have one."""

import torch
import torch.distributed as dist
from base import Trainer, main

MEET_EVERY = 4


class LocalSGD(Trainer):
    def loss(self, model, batch):
        """By the model itself: DDP would average the gradients."""
        return super().loss(self.model, batch)

    def update(self):
        super().update()
        if (self.done + 1) % MEET_EVERY == 0:
            with torch.no_grad():
                for weight in self.model.parameters():
                    dist.all_reduce(weight)
                    weight /= self.world

    def path(self, step):
        return self.folder / f"step{step}-rank{self.rank}.pt"

    def save(self):
        path = self.path(self.done)
        state = {"model": self.model.state_dict(), "own": self.own_state(), **self.shared_state()}
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def newest(self):
        own = {int(path.stem.partition("-")[0][4:]) for path in self.folder.glob(f"step*-rank{self.rank}.pt")}
        found = [None] * self.world
        dist.all_gather_object(found, own)
        return max(set.intersection(*found), default=None)

    def load(self, step):
        state = torch.load(self.path(step), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)
        self.load_rng(state["own"])


main(LocalSGD)
