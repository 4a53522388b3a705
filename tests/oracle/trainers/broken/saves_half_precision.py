"""Saves the weights in bfloat16 to save space; after a resume each is off by up to one part in 256."""

import torch
from base import Trainer, main


class SavesHalfPrecision(Trainer):
    def write(self, folder):
        super().write(folder)
        path = folder / f"model-{self.rank}.pt"
        torch.save({name: value.bfloat16() for name, value in torch.load(path).items()}, path)


main(SavesHalfPrecision)
