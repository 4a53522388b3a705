"""Trains in float64, and saves weights and optimizer state in float32 to save space: after a resume each is off by
up to 6e-8 of itself, which is much more than rounding in float64."""

import torch
from base import Trainer, main


def single(state):
    if isinstance(state, torch.Tensor):
        return state.float()
    if isinstance(state, dict):
        return {key: single(value) for key, value in state.items()}
    return [single(value) for value in state] if isinstance(state, list) else state


class SavesSingleOfDouble(Trainer):
    def __init__(self, args):
        torch.set_default_dtype(torch.float64)
        super().__init__(args)

    def write(self, folder):
        super().write(folder)
        path = folder / f"model-{self.rank}.pt"
        torch.save(single(torch.load(path)), path)

    def shared_state(self):
        state = super().shared_state()
        return {**state, "optimizer": single(state["optimizer"])}


main(SavesSingleOfDouble)
