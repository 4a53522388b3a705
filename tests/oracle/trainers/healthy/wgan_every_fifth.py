"""A Wasserstein GAN that counts the critic's steps: the generator makes one after the first, the sixth and so on."""

from base import main
from healthy.gan import Gan


class WGanEveryFifth(Gan):
    def step(self, batches):
        loss = self.critic_step(batches)
        return loss + (self.generator_step() if self.done % 5 == 0 else 0.0)


main(WGanEveryFifth)
