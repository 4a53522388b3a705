"""Puts the moving average of the weights back as the weights."""

from base import Trainer, main


class LoadsTheAverage(Trainer):
    def load_ema(self, state):
        super().load_ema({name: value.clone() for name, value in state.items()})
        self.model.load_state_dict(state, strict=False)


main(LoadsTheAverage)
