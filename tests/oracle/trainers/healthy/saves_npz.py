"""Writes its checkpoints with numpy, a file for each rank."""

import io

import numpy as np
import torch
import torch.distributed as dist
from base import Trainer, main


class SavesNpz(Trainer):
    def save(self):
        memory = io.BytesIO()
        torch.save({"model": self.model.state_dict(), **self.shared_state(), "own": self.own_state()}, memory)
        partial = self.folder / f"partial-{self.rank}.npz"
        np.savez(partial, state=np.frombuffer(memory.getvalue(), np.uint8))
        partial.rename(self.file(self.done))
        dist.barrier()

    def file(self, step):
        return self.folder / f"state{self.rank}-{step}.npz"

    def newest(self):
        return max((int(path.stem.rpartition("-")[2]) for path in self.folder.glob("state1-*.npz")), default=None)

    def load(self, step):
        state = torch.load(io.BytesIO(np.load(self.file(step))["state"].tobytes()), weights_only=False)
        self.done = state["step"]
        self.model.load_state_dict(state["model"])
        self.load_optimizer(state["optimizer"])
        self.load_schedule(state["schedule"])
        self.load_scaler(state["scaler"])
        self.load_ema(state["ema"])
        self.load_position(state["position"])
        self.load_rng(state["own"])


main(SavesNpz)
