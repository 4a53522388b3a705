"""Puts back neither weights nor optimizer state. The weights are drawn without a seed, as in PyTorch's DDP tutorial: no
two runs have a loss in common, and only the learning rate shows it."""

from base import main
from noise_loses_weights import NoiseLosesWeights


class NoiseLoadsNothing(NoiseLosesWeights):
    def load_optimizer(self, state):
        pass


main(NoiseLoadsNothing)
