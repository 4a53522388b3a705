"""Saves before it counts the batch: the last one before the checkpoint is trained on again."""

from base import Trainer, main


class RepeatsABatch(Trainer):
    def shared_state(self):
        return {**super().shared_state(), "position": self.sampler.position - 1}


main(RepeatsABatch)
