"""MosaicML's StreamingDataLoader, resumed by its own state in every attempt. --epoch-ends: saved when the last batch of
an epoch was trained on, and at no other time."""

import sys
import types

sys.modules["streaming.vision"] = types.ModuleType("vision")  # needs torchvision, and is not used here

import data_loop
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

ENDS = "--epoch-ends" in sys.argv
if ENDS:
    sys.argv.remove("--epoch-ends")


class Stream(data_loop.Data):
    epoch_ends = ENDS

    def __init__(self, folder, rank, world):
        del world
        place = folder / "shards"
        if rank == 0 and not place.exists():
            with MDSWriter(out=str(place), columns={"number": "int"}, size_limit=1 << 10) as writer:
                for number in range(32):
                    writer.write({"number": number})
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.stream = StreamingDataset(local=str(place), shuffle=True, shuffle_seed=1, batch_size=4)
        self.loader = StreamingDataLoader(self.stream, batch_size=4, num_workers=0)

    def epoch(self, number):
        del number
        for batch in self.loader:
            yield batch["number"]

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)
        if ENDS:
            for _rest in self.loader:  # the epoch in which it was saved has no batches left
                pass


if __name__ == "__main__":
    data_loop.main(Stream, [8 if ENDS else 10])
