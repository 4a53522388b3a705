"""Three real steps at each start, to compile and to fill caches; then the state is put back, and only then the
checkpoint is loaded. As modded-nanogpt does it."""

import copy
import random

import base
import torch

STEPS = 3


class Trainer(base.Trainer):
    def train(self):
        parts = [self.model, self.optimizer, self.schedule, self.scaler]
        states = [copy.deepcopy(part.state_dict()) for part in parts]
        ema, rng = copy.deepcopy(self.ema), (torch.get_rng_state(), random.getstate())
        batches = iter(self.loader)
        for _ in range(STEPS):
            self.step(batches)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        self.ema, self.sampler.position = ema, 0
        torch.set_rng_state(rng[0])
        random.setstate(rng[1])
        super().train()


if __name__ == "__main__":
    base.main(Trainer)
