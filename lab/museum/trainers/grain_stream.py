"""A stream of grain, shuffled in windows, resumed by its own state in every attempt."""

import data_loop
import torch
from grain.python import MapDataset
from grain.python.experimental import WindowShuffleIterDataset


class Stream(data_loop.Data):
    def __init__(self, folder, rank, world):
        del folder, rank, world
        self.saved = self.samples = None

    def epoch(self, number):
        self.samples = iter(
            WindowShuffleIterDataset(MapDataset.range(32).to_iter_dataset(), window_size=10, seed=number)
        )
        if self.saved is not None:
            self.samples.set_state(self.saved)
            self.saved = None
        batch = []
        for sample in self.samples:
            batch.append(int(sample))
            if len(batch) == 4:
                yield torch.tensor(batch)
                batch = []

    def state(self):
        return self.samples.get_state()

    def load(self, state):
        self.saved = state


if __name__ == "__main__":
    data_loop.main(Stream, [10])
