"""Accelerate's loop with dropout, saved and resumed by `save_state` and `load_state`."""

import json

import torch
import trainer_main
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

STEPS, SAVE_EVERY = 24, 5


class Loop:
    def __init__(self):
        set_seed(0)
        self.accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))

    def step(self, number):
        loss = self.model(self.table[number]).square().mean()
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss.item()


def plain(folder):
    def run(first, last, load=False, save=False):
        loop = Loop()
        if load:
            loop.accelerator.load_state(str(folder / "saved"))
        losses = [loop.step(number) for number in range(first, last)]
        if save:
            loop.accelerator.save_state(str(folder / "saved"))
        return losses

    resumed = run(0, 10, save=True) + run(10, STEPS, load=True)
    print(json.dumps({"whole": run(0, STEPS), "resumed": resumed}))


def train(folder):
    loop = Loop()
    accelerator, done = loop.accelerator, 0
    found = {int(path.name[5:]): path for path in folder.glob("step-*") if (path / "whole").exists()}
    accelerator.wait_for_everyone()
    if found:
        done = max(found)
        accelerator.load_state(str(found[done]))
    while done < STEPS:
        loss = loop.step(done)
        done += 1
        accelerator.print(f"step {done} loss {loss:.9g}", flush=True)
        if done % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"step-{done}"))
            accelerator.wait_for_everyone()
            (folder / f"step-{done}" / "whole").touch()
    accelerator.end_training()


if __name__ == "__main__":
    trainer_main.main(plain, train)
