"""LitData's StreamingDataLoader, resumed by its own state in every attempt. --shape chooses what the row needs."""

import sys

import data_loop
import torch
from litdata.streaming import Cache, CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

SHAPE = sys.argv.pop(sys.argv.index("--shape") + 1)
sys.argv.remove("--shape")
WORKERS = {"plain": 0, "chunks": 1, "done": 2, "combined": 1}[SHAPE]
CUTS = [15] if SHAPE == "done" else [10]


def written(place, numbers, chunk_size):
    if not place.exists():
        place.mkdir(parents=True)
        cache = Cache(str(place), chunk_size=chunk_size)
        for index, number in enumerate(numbers):
            cache[index] = number
        cache.done()
        cache.merge()
    return str(place)


def made(folder):
    place = written(folder / "chunks", range(32), 5 if SHAPE == "chunks" else 4)
    if SHAPE == "combined":
        return CombinedStreamingDataset([StreamingDataset(place, shuffle=True)], seed=0)
    return StreamingDataset(place, shuffle=False)


class Stream(data_loop.Data):
    epochs = (
        2 if SHAPE == "chunks" else 3
    )  # with that row's fixed version, the epochs after a resume's own are not right

    def __init__(self, folder, rank, world):
        del world
        if rank == 0:
            dataset = made(folder)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if rank:
            dataset = made(folder)
        self.loader = StreamingDataLoader(dataset, batch_size=4, num_workers=WORKERS)

    def epoch(self, number):
        del number
        for batch in self.loader:
            yield torch.as_tensor(batch)

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)


if __name__ == "__main__":
    data_loop.main(Stream, CUTS)
