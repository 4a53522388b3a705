"""A Wasserstein GAN: five steps of the critic for each of the generator."""

from base import main
from healthy.gan import Gan


class WGan(Gan):
    critic_steps = 5


if __name__ == "__main__":
    main(WGan)
