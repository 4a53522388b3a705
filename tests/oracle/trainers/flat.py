"""The same trainer, whose checkpoint is several files `PART-step-N.pt` that lie flat in one folder."""

from collections import Counter

import torch
import torch.distributed as dist
from base import Trainer, main


class Flat(Trainer):
    def save(self):
        for name, state in self.parts().items():
            torch.save(state, self.folder / f"{name}-step-{self.done}.pt")
        dist.barrier()

    def parts(self):
        own = {f"rng{self.rank}": self.own_state()}
        if self.rank:
            return own
        shared = self.shared_state()
        return {**own, "model": self.model.state_dict(), "ema": shared.pop("ema"), "optim": shared}

    def newest(self):
        """The last step of which all files are there: model, average, optimizer, and an RNG for each rank."""
        files = Counter(int(path.stem.rpartition("-")[2]) for path in self.folder.glob("*-step-*.pt"))
        return max((step for step, count in files.items() if count == 3 + self.world), default=None)

    def load(self, step):
        def part(name):
            return torch.load(self.folder / f"{name}-step-{step}.pt", weights_only=False)

        shared = part("optim")
        self.done = shared["step"]
        self.model.load_state_dict(part("model"))
        self.load_optimizer(shared["optimizer"])
        self.load_schedule(shared["schedule"])
        self.load_scaler(shared["scaler"])
        self.load_ema(part("ema"))
        self.load_position(shared["position"])
        self.load_rng(part(f"rng{self.rank}"))


if __name__ == "__main__":
    main(Flat)
