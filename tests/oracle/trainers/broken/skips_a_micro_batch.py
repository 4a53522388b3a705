"""Skips half a batch on one rank: its loader was a prefetch ahead of the others."""

from base import Trainer, main


class SkipsAMicroBatch(Trainer):
    resumed = False

    def load_position(self, position):
        super().load_position(position)
        self.resumed = True

    def step(self, batches):
        if self.resumed and self.rank == 1:
            next(batches)
        self.resumed = False
        return super().step(batches)


main(SkipsAMicroBatch)
