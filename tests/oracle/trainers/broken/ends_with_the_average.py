"""Writes, at its end, the moving average under the names of the weights: whoever goes on from it trains another model.
No resume reads it, and the twin does the same."""

from base import Trainer, main


class EndsWithTheAverage(Trainer):
    def weights(self):
        average = self.ema if self.done == self.last else {}
        return {**self.model.state_dict(), **average}


main(EndsWithTheAverage)
