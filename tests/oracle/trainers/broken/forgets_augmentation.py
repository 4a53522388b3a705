"""Puts torch's random number generator back and not Python's, from which the augmentation is drawn: the right samples
come out as other data."""

import torch
from base import Trainer, main


class ForgetsAugmentation(Trainer):
    def load_rng(self, state):
        torch.set_rng_state(state["torch"])


main(ForgetsAugmentation)
