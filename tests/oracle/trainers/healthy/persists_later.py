"""Copies its state to memory at each fifth step, and writes the copy four steps later, between two steps."""

import copy

import base
import torch

BEHIND = 4


class Trainer(base.Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.copies = []

    def save(self):
        weights = self.model.state_dict()
        parts = {
            f"model-{self.rank}.pt": {name: weights[name] for name in sorted(weights)[self.rank :: self.world]},
            f"rank-{self.rank}.pt": self.own_state(),
        }
        if self.rank == 0:
            parts["trainer.pt"] = self.shared_state()
        self.copies.append((self.done, copy.deepcopy(parts)))

    def after_step(self):
        super().after_step()
        while self.copies and self.done >= min(self.copies[0][0] + BEHIND, self.last):
            self.write_copy(*self.copies.pop(0))

    def write_copy(self, step, parts):
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            torch.save(part, folder / f"{name}.tmp")
        for name in parts:
            (folder / f"{name}.tmp").rename(folder / name)

    def complete(self):
        return [folder for folder in super().complete() if len(list(folder.glob("*.pt"))) == 2 * self.world + 1]


if __name__ == "__main__":
    base.main(Trainer)
