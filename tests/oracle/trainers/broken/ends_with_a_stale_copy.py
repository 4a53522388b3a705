"""Saves, at its end, a copy of the weights that it made at the save before. The step, the optimizer and all else are
those of the end, no resume reads it, and the twin does the same."""

from base import Trainer, main


class EndsWithAStaleCopy(Trainer):
    copy = None

    def weights(self):
        if self.done < self.last or self.copy is None:
            self.copy = {name: value.clone() for name, value in self.model.state_dict().items()}
        return self.copy


main(EndsWithAStaleCopy)
