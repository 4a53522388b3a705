"""Goes on with the next epoch: what was left of the one that it was in is never seen."""

from base import GLOBAL_BATCH, SAMPLES, Trainer, main


class SkipsRestOfEpoch(Trainer):
    def load_position(self, position):
        per_epoch = SAMPLES // GLOBAL_BATCH
        self.sampler.position = -(-position // per_epoch) * per_epoch


main(SkipsRestOfEpoch)
