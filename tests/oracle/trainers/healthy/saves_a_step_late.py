"""Copies its state when a checkpoint is due, and begins to write the copy after the next step, in a thread: so that
neither the copying nor the writing holds up training."""

import copy
import threading

import torch
from base import Trainer, main


class SavesAStepLate(Trainer):
    held, writer = None, None

    def after_step(self):
        self.write_held()
        super().after_step()

    def save(self):
        parts = {f"model-{self.rank}.pt": self.mine(), f"rank-{self.rank}.pt": self.own_state()}
        if self.rank == 0:
            parts["trainer.pt"] = self.shared_state()
        self.held = self.done, copy.deepcopy(parts)

    def write_held(self):
        if self.held is not None:
            self.writer = threading.Thread(target=self.write_parts, args=self.held)
            self.writer.start()
            self.held = None

    def write_parts(self, step, parts):
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            torch.save(part, folder / f"{name}.tmp")
        for name in parts:
            (folder / f"{name}.tmp").rename(folder / name)

    def complete(self):
        return [folder for folder in super().complete() if len(list(folder.glob("*.pt"))) == 2 * self.world + 1]

    def finish(self):
        self.write_held()
        self.writer.join()
        super().finish()


main(SavesAStepLate)
