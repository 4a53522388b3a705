"""torchdata's StatefulDataLoader, saved when an epoch's last batch was trained on."""

import data_loop
from torchdata.stateful_dataloader import StatefulDataLoader


class Loader(data_loop.Data):
    epoch_ends = True

    def __init__(self, folder, rank, world):
        del folder, rank, world
        self.loader = StatefulDataLoader(range(32), batch_size=4, shuffle=False, num_workers=0)

    def epoch(self, number):
        del number
        yield from self.loader

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)


if __name__ == "__main__":
    data_loop.main(Loader, [8])
