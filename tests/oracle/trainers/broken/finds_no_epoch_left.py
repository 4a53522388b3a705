"""Goes on with the next epoch after a resume, and in the last epoch there is none: it ends at once, with exit code 0
and the weights of the checkpoint."""

from base import GLOBAL_BATCH, SAMPLES, Trainer, main


class FindsNoEpochLeft(Trainer):
    def load_position(self, position):
        super().load_position(position)
        steps = SAMPLES // GLOBAL_BATCH
        if position // steps == (self.last - 1) // steps:
            self.last = self.done


main(FindsNoEpochLeft)
