"""A checkpoint at the very end of an epoch counts as one of the next epoch, which is then skipped; exit code 0 (verl,
issue 7401)."""

from base import GLOBAL_BATCH, SAMPLES, Trainer, main


class SkipsEpochAtBoundary(Trainer):
    def load_position(self, position):
        per_epoch = SAMPLES // GLOBAL_BATCH
        self.sampler.position = position if position % per_epoch else position + per_epoch


main(SkipsEpochAtBoundary)
