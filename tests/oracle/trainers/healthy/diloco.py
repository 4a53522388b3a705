"""Each rank trains by itself for four steps; then the mean of what they moved by is the gradient of an outer optimizer
(DiLoCo). Ranks differ between two meetings, and a checkpoint holds the weights and the optimizer of each."""

import torch
import torch.distributed as dist
from base import Trainer, main

MEET_EVERY = 4


class DiLoCo(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.common = [one.detach().clone() for one in self.model.parameters()]
        self.outer = torch.optim.SGD(self.common, lr=0.7, momentum=0.9, nesterov=True)

    def loss(self, model, batch):
        """By the model itself: DDP would average the gradients."""
        return super().loss(self.model, batch)

    def update(self):
        super().update()
        if (self.done + 1) % MEET_EVERY == 0:
            self.meet()

    def meet(self):
        with torch.no_grad():
            for common, own in zip(self.common, self.model.parameters(), strict=True):
                common.grad = common - own
                dist.all_reduce(common.grad)
                common.grad /= self.world
        self.outer.step()
        with torch.no_grad():
            for common, own in zip(self.common, self.model.parameters(), strict=True):
                own.copy_(common)

    def write(self, folder):
        super().write(folder)
        torch.save(self.model.state_dict(), folder / f"own-{self.rank}.pt")

    def own_state(self):
        inner = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(), "ema": self.ema}
        return {**super().own_state(), **inner}

    def shared_state(self):
        return {**super().shared_state(), "common": self.common, "outer": self.outer.state_dict()}

    def load(self, folder):
        super().load(folder)
        shared, own = torch.load(folder / "trainer.pt"), torch.load(folder / f"rank-{self.rank}.pt", weights_only=False)
        self.model.load_state_dict(torch.load(folder / f"own-{self.rank}.pt"))
        self.optimizer.load_state_dict(own["optimizer"])
        self.scaler.load_state_dict(own["scaler"])
        self.ema = own["ema"]
        self.load_outer(shared["outer"])
        with torch.no_grad():
            for one, saved in zip(self.common, shared["common"], strict=True):
                one.copy_(saved)

    def load_outer(self, state):
        self.outer.load_state_dict(state)


if __name__ == "__main__":
    main(DiLoCo)
