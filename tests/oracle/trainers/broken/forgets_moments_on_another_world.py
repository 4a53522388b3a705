"""Begins the optimizer's moments anew when it resumes on another number of ranks: a resharding that was never written.
The steps' counters, the weights and the samples are put back."""

import torch
from base import Trainer, main


class ForgetsMomentsOnAnotherWorld(Trainer):
    def shared_state(self):
        return {**super().shared_state(), "position": [self.sampler.position, self.sampler.world]}

    def load_position(self, position):
        self.sampler.position, world = position
        if world != self.world:
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        value.zero_()


main(ForgetsMomentsOnAnotherWorld)
