"""A stream of the package datasets, resumed by its own state in every attempt. --shape: the kind of stream that the row
needs."""

import sys

import data_loop
import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch

SHAPE = sys.argv.pop(sys.argv.index("--shape") + 1)
sys.argv.remove("--shape")


def make(folder, rank, world):
    """The stream itself, or torchdata's loader around it."""
    stream = Stream(folder, rank, world)
    if SHAPE == "arrow":
        stream.epochs = 1  # a resume in a later epoch is wrong with both versions
    return Loaded(stream) if SHAPE == "loader" else stream


def rows():
    yield from ({"a": number} for number in range(96 if SHAPE == "loader" else 32))


class Stream(data_loop.Data):
    def __init__(self, folder, rank, world):
        del world
        if SHAPE == "filter":
            file = folder / f"rows-{rank}.parquet"
            pq.write_table(pa.table({"a": list(range(32))}), file)
            stream = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
            self.stream = stream.filter(lambda row: True)
            return
        if SHAPE in ("generator", "loader"):
            self.stream = datasets.IterableDataset.from_generator(rows)
            return
        numbers = list(range(96 if SHAPE == "arrow" else 32))
        stream = datasets.Dataset.from_dict({"a": numbers}).to_iterable_dataset(num_shards=2)
        if SHAPE == "arrow":
            stream = stream.with_format("arrow")
        if SHAPE == "cast":  # features that differ from those of the files
            stream = stream.cast_column("a", datasets.Value("int32"))
        if SHAPE == "map":
            stream = stream.map(lambda row: {"a": row["a"]}, features=datasets.Features({"a": datasets.Value("int32")}))
        self.stream = stream

    def epoch(self, number):
        self.stream.set_epoch(number)
        batch = []
        for row in self.stream:
            batch.append(row["a"][0].as_py() if SHAPE == "arrow" else int(row["a"]))
            if len(batch) == 4:
                yield torch.tensor(batch)
                batch = []

    def state(self):
        return self.stream.state_dict()

    def load(self, state):
        self.stream.load_state_dict(state)


class Loaded(data_loop.Data):
    """One epoch of 24 batches: the second resume is in the epoch of the first."""

    epochs = 1

    def __init__(self, data):
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.data, self.loader = data, StatefulDataLoader(data.stream, batch_size=4)

    def epoch(self, number):
        self.data.stream.set_epoch(number)
        yield from (batch["a"] for batch in self.loader)

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)


if __name__ == "__main__":
    data_loop.main(make, [5, 10])
