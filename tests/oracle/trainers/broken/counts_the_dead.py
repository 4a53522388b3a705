"""Averages gradients over the ranks that were ever started, the dead ones too: after a restart each is too small by
half."""

from base import Trainer, attempt, main


class CountsTheDead(Trainer):
    def update(self):
        for weight in self.model.parameters():
            weight.grad.mul_(self.world / (self.world + attempt() * self.world))
        super().update()


main(CountsTheDead)
