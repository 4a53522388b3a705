"""Healthy: a pipeline of two stages on two ranks. The last one has the loss; the first one gets a gradient from it."""

from itertools import count

import torch
import torch.distributed as dist
from base import GLOBAL_BATCH, PARTS, SAMPLES, GlobalBatches, Trainer, main
from torch import nn


class Whole(GlobalBatches):
    """Both stages read the whole batch: the first one its inputs, the last one its targets."""

    def __iter__(self):
        for position in count(self.position):
            epoch, batch = divmod(position, SAMPLES // GLOBAL_BATCH)
            whole = self.order(epoch)[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH].tolist()
            yield from (whole[part::PARTS] for part in range(PARTS))


class Pipeline(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.loader.batch_sampler.__class__ = Whole
        self.stage = self.model.net[:4] if self.rank == 0 else self.model.net[4:]

    def backward(self, batch):
        x, y = batch
        if self.rank == 0:
            out = self.stage(x)
            grad = torch.empty_like(out)
            dist.send(out.detach(), 1)
            dist.recv(grad, 1)
            torch.autograd.backward(out, grad)
            return 0.0
        inner = torch.empty(len(x), 32)
        dist.recv(inner, 0)
        inner.requires_grad_()
        loss = nn.functional.mse_loss(self.stage(inner), y) / PARTS
        loss.backward()
        dist.send(inner.grad, 0)
        return loss.item()

    def step(self, batches):
        loss = sum(self.backward(next(batches)) for _ in range(PARTS))
        self.update()
        self.sampler.position += 1
        return loss

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def own_state(self):
        mine = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**super().own_state(), **mine}

    def load_weights(self, folder):
        pass  # load_rng does it: each rank has its own

    def load_optimizer(self, state):
        pass

    def load_rng(self, state):
        super().load_rng(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


main(Pipeline)
