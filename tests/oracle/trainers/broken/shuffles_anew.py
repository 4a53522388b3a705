"""The seed of the order is drawn when a process starts and is not in the checkpoint: after a resume the epoch goes on
in another order."""

import os

from base import Trainer, main


class ShufflesAnew(Trainer):
    def load_position(self, position):
        super().load_position(position)
        self.sampler.seed = 1000 + os.getppid()  # all ranks have one parent


main(ShufflesAnew)
