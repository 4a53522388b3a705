"""Forgets the random number generators: dropout and augmentation after a restart are those of the first steps
(Lightning 2.6; transformers, before it saved rng_state.pth)."""

from base import Trainer, main


class ForgetsRng(Trainer):
    def load_rng(self, state):
        pass


main(ForgetsRng)
