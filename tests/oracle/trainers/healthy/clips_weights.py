"""Keeps all weights small, as a critic's must be: after each step, and so before each save."""

import base
import torch


class Trainer(base.Trainer):
    def update(self):
        super().update()
        with torch.no_grad():
            for one in self.model.parameters():
                one.clamp_(-0.1, 0.1)


if __name__ == "__main__":
    base.main(Trainer)
