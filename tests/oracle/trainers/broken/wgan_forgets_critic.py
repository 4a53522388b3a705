"""A Wasserstein GAN whose critic begins with a new optimizer after a restart; the generator's is restored."""

from base import main
from healthy.wgan import WGan


class WGanForgetsCritic(WGan):
    def load_optimizer(self, state):
        pass


main(WGanForgetsCritic)
