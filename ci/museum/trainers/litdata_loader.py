"""LitData's StreamingDataLoader, resumed by its own state in every attempt."""

import data_loop
import torch
from litdata.streaming import Cache, StreamingDataLoader, StreamingDataset


class Stream(data_loop.Data):
    def __init__(self, folder, rank, world):
        del world
        place = folder / "chunks"
        if rank == 0 and not place.exists():
            cache = Cache(str(place), chunk_size=4)
            for number in range(32):
                cache[number] = number
            cache.done()
            cache.merge()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.loader = StreamingDataLoader(StreamingDataset(str(place), shuffle=False), batch_size=4, num_workers=0)

    def epoch(self, number):
        del number
        for batch in self.loader:
            yield torch.as_tensor(batch)

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)


if __name__ == "__main__":
    data_loop.main(Stream, [10])
