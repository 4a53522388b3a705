"""Counts the batches since the last restart, and saves that count as the position of the loader: the first resume is
right, and the second begins where the first resumed attempt had got to by itself (torchtitan, issue 3908)."""

from base import Trainer, main


class LoaderRightOnce(Trainer):
    begun = 0

    def load_position(self, position):
        self.sampler.position = position
        self.begun = position

    def shared_state(self):
        return {**super().shared_state(), "position": self.sampler.position - self.begun}


main(LoaderRightOnce)
