"""A Wasserstein GAN whose critic is given the first batches again after a restart."""

from base import main
from healthy.wgan import WGan


class WGanRestartsSampler(WGan):
    def load_position(self, position):
        pass


main(WGanRestartsSampler)
