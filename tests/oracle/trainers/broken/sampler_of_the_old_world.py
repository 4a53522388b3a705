"""Shares the data out among as many ranks as there were when the checkpoint was written: after the job has shrunk,
half of each batch is consumed by nobody."""

from base import Trainer, main


class SamplerOfTheOldWorld(Trainer):
    def shared_state(self):
        return {**super().shared_state(), "position": [self.sampler.position, self.sampler.world]}

    def load_position(self, position):
        self.sampler.position, self.sampler.world = position


main(SamplerOfTheOldWorld)
