"""The GradScaler's state is not put back: the scale starts again at its first value."""

from base import Trainer, main


class ForgetsScaler(Trainer):
    def load_scaler(self, state):
        pass


main(ForgetsScaler)
