"""Counts backwards, and saves each seventh: also in the midst of an accumulation of two, with the gradients so far."""

import torch
from base import PARTS, GlobalBatches, Points, Trainer, main
from torch.utils.data import DataLoader

SAVE_EVERY = 7  # backwards


class Rest(GlobalBatches):
    """Without the first `skip` parts of the first batch, which are in the gradients."""

    skip = 0

    def __iter__(self):
        parts = super().__iter__()
        for _part in range(self.skip):
            next(parts)
        yield from parts


class KeepsGradients(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.backwards, self.gradients = 0, None
        self.sampler = Rest(args.seed)
        self.loader = DataLoader(Points(args.augment), batch_sampler=self.sampler, generator=torch.Generator())

    def step(self, batches):
        loss = 0.0
        while True:
            last = self.backwards % PARTS == PARTS - 1
            with torch.enable_grad() if last else self.ddp.no_sync():
                loss += self.backward(next(batches))
            self.backwards += 1
            if last:
                break
            self.save_in_time()
        self.update()
        self.sampler.position += 1
        return loss

    def after_step(self):
        self.save_in_time()

    def save_in_time(self):
        if self.backwards % SAVE_EVERY == 0:
            self.save()

    def save(self):
        self.gradients = None
        if self.backwards % PARTS:
            self.gradients = [one.grad.clone() for one in self.model.parameters()]
        super().save()

    def own_state(self):
        return {**super().own_state(), "backwards": self.backwards, "gradients": self.gradients}

    def load_rng(self, own):
        super().load_rng(own)
        self.backwards = own["backwards"]
        for one, gradient in zip(self.model.parameters(), own["gradients"] or (), strict=False):
            one.grad = gradient
        self.sampler.skip = self.backwards % PARTS


main(KeepsGradients)
