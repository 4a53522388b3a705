"""One file, opened for writing in place: a death in the middle of a save leaves nothing, and the next attempt starts
afresh (Lightning, issue 19970: saves are not atomic)."""

import torch
import torch.distributed as dist
from base import Trainer, main


class OverwritesInPlace(Trainer):
    def save(self):
        dist.barrier()
        path = self.folder / f"checkpoint-{self.rank}.pt"
        weights = self.model.state_dict()
        with open(path, "wb") as file:
            torch.save({"model": weights, "own": self.own_state(), **self.shared_state()}, file)
        dist.barrier()

    def newest(self):
        path = self.folder / f"checkpoint-{self.rank}.pt"
        there = torch.tensor([path.exists() and path.stat().st_size > 0], dtype=torch.int64)
        dist.all_reduce(there, dist.ReduceOp.MIN)
        return path if there.item() else None

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)
        self.load_rng(state["own"])


main(OverwritesInPlace)
