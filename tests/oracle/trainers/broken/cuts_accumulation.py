"""Saves in the middle of an accumulation and does not save the gradients: the first step after a resume has one
backward instead of two."""

from base import PARTS, Trainer, main


class CutsAccumulation(Trainer):
    resumed = False

    def step(self, batches):
        if not self.resumed:
            return super().step(batches)
        self.resumed = False
        for _part in range(PARTS - 1):
            next(batches)
        loss = self.backward(next(batches))
        self.update()
        self.sampler.position += 1
        return loss

    def load_position(self, position):
        super().load_position(position)
        self.resumed = True


main(CutsAccumulation)
