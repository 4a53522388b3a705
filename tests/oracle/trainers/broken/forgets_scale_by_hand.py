"""Scales its loss by hand: gradients beyond the range of float16 halve the scale and leave the iteration out, and five
good iterations double it. The scale is not saved, and other iterations are left out after a resume."""

import torch
from base import PARTS, Trainer, main

LARGEST = torch.finfo(torch.float16).max


class ForgetsScaleByHand(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.scale, self.good = 2.0**20, 0

    def backward(self, batch):
        loss = self.loss(self.ddp, batch) / PARTS
        loss.backward(gradient=torch.tensor(self.scale))
        return loss.item()

    def update(self):
        weights = list(self.model.parameters())
        if max(one.grad.abs().max() for one in weights) > LARGEST:
            self.scale, self.good = self.scale / 2, 0
            self.optimizer.zero_grad()
            return
        for one in weights:
            one.grad /= self.scale
        self.good += 1
        if self.good % 5 == 0:
            self.scale *= 2
        super().update()


main(ForgetsScaleByHand)
