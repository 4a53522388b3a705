"""Saves where the loader is instead of what was trained on: one batch had been fetched ahead, and is lost (torchft,
issue 309, has a replica that is one batch off)."""

from base import Trainer, main


class SkipsABatch(Trainer):
    def shared_state(self):
        return {**super().shared_state(), "position": self.sampler.position + 1}


main(SkipsABatch)
