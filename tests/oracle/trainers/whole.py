"""The same trainer, whose checkpoint is one file `step-N.pt`, which rank 0 writes and then renames."""

import torch
import torch.distributed as dist
from base import Trainer, main


class Whole(Trainer):
    def save(self):
        states = [None] * self.world
        dist.all_gather_object(states, self.own_state())
        if self.rank == 0:
            self.put({"model": self.model.state_dict(), "rng": states, **self.shared_state()}, self.path())
        dist.barrier()

    def path(self):
        return self.folder / f"step-{self.done}.pt"

    def put(self, state, path):
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def complete(self):
        return sorted(self.folder.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)
        self.load_rng(state["rng"][self.rank])


if __name__ == "__main__":
    main(Whole)
