"""Goes on at the beginning of the epoch that it was in, and so consumes its first samples twice: Lightning without a
stateful loader."""

from base import GLOBAL_BATCH, SAMPLES, Trainer, main


class RestartsEpoch(Trainer):
    def load_position(self, position):
        per_epoch = SAMPLES // GLOBAL_BATCH
        self.sampler.position = position // per_epoch * per_epoch


main(RestartsEpoch)
