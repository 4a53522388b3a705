"""Healthy and noisy, with a loss that goes from above zero to below: a likelihood, or a policy's gain. A relative
difference from a value near zero says nothing."""

from atomics import Atomics
from base import main


class CrossesZero(Atomics):
    def loss(self, model, batch):
        return super().loss(model, batch) - 1.1


if __name__ == "__main__":
    main(CrossesZero)
