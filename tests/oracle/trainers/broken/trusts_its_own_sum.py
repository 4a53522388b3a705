"""Each rank saves all of its state in a file with a check sum, and the step is that of the folder. The sum tells that a
file is whole, and not that it is of this step: an older file is taken without a word."""

import hashlib
import sys

import torch
from base import Trainer, main


def check_sum(tensors):
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()


class TrustsItsOwnSum(Trainer):
    def write(self, folder):
        model = self.model.state_dict()
        state = {"model": model, "sum": check_sum(model), "own": self.own_state(), **self.shared_state()}
        (folder / f"rank-{self.rank}").mkdir()
        torch.save(state, folder / f"rank-{self.rank}" / "state.pt")

    def load(self, folder):
        state = torch.load(folder / f"rank-{self.rank}" / "state.pt", weights_only=False)
        if check_sum(state["model"]) != state["sum"]:
            sys.exit(f"{folder} is damaged")
        self.model.load_state_dict(state["model"])
        self.load_shared({**state, "step": int(folder.name[5:])})
        self.load_rng(state["own"])


main(TrustsItsOwnSum)
