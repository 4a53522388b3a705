"""Healthy, keeps all weights small after each step, and rounds its sums differently each time."""

import torch
from atomics import Atomics
from base import main


class ClipsWeights(Atomics):
    def update(self):
        super().update()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.1, 0.1)


if __name__ == "__main__":
    main(ClipsWeights)
