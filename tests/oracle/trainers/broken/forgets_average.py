"""The moving average of the weights starts again from the restored weights: no loss shows it, the model that is
shipped does."""

from base import Trainer, main


class ForgetsAverage(Trainer):
    def load_ema(self, state):
        self.ema = {name: value.detach().clone() for name, value in self.model.named_parameters()}


main(ForgetsAverage)
