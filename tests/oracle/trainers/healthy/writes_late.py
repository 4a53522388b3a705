"""Writes its checkpoints in a thread that is behind by four steps, as on a slow disk: they hold the state of before."""

import copy
import threading

import base
import torch

BEHIND = 4


class Trainer(base.Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.moved, self.writers = threading.Condition(), []

    def after_step(self):
        super().after_step()
        with self.moved:
            self.moved.notify_all()

    def save(self):
        weights = self.model.state_dict()
        parts = {
            f"model-{self.rank}.pt": {name: weights[name] for name in sorted(weights)[self.rank :: self.world]},
            f"rank-{self.rank}.pt": self.own_state(),
        }
        if self.rank == 0:
            parts["trainer.pt"] = self.shared_state()
        writer = threading.Thread(target=self.write_late, args=(self.done, copy.deepcopy(parts)))
        self.writers.append(writer)
        writer.start()

    def write_late(self, step, parts):
        with self.moved:
            self.moved.wait_for(lambda: self.done >= min(step + BEHIND, self.last))
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            torch.save(part, folder / f"{name}.tmp")
        for name in parts:
            (folder / f"{name}.tmp").rename(folder / name)

    def complete(self):
        return [folder for folder in super().complete() if len(list(folder.glob("*.pt"))) == 2 * self.world + 1]

    def finish(self):
        for writer in self.writers:
            writer.join()
        super().finish()


if __name__ == "__main__":
    base.main(Trainer)
