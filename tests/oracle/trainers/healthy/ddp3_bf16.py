"""Healthy: the base trainer, with its forward pass in bfloat16, whose rounding is 65,000 times that of float32."""

import torch
from base import Trainer, main


class InHalf(Trainer):
    def loss(self, model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(model, batch)


main(InHalf)
