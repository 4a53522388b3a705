"""A loop of Lightning Fabric: `setup` wraps the model and the optimizer, which are saved and loaded by their own
states."""

import json
import os

import torch
import trainer_main
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

STEPS, SAVE_EVERY = 24, 5


class Loop:
    def __init__(self, fabric):
        torch.manual_seed(0)
        self.fabric, model = fabric, nn.Linear(8, 1)
        self.model, self.optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
        self.done, self.batches = 0, None

    def step(self):
        if self.batches is None:
            self.batches = iter(DataLoader(self.table, batch_size=None, sampler=range(self.done, STEPS)))
        loss = (self.model(next(self.batches)) - 1).square().mean()
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        self.optimizer.step()
        self.done += 1
        print(f"step {self.done} loss {loss.item():.9g}", flush=True)

    def save(self, path):
        state = {"step": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = path.with_name("partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path):
        saved = torch.load(path)
        self.done = saved["step"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def plain(folder):
    def run(loop, steps):
        seen = []
        while loop.done < steps:
            loop.step()
            seen.append([loop.done, *loop.model.weight[0].tolist()])
        return seen

    fabric = Fabric(accelerator="cpu", devices=1)
    begun, resumed = Loop(fabric), Loop(fabric)
    first = run(begun, 10)
    begun.save(folder / "saved")
    resumed.load(folder / "saved")
    print(json.dumps({"whole": run(Loop(fabric), STEPS), "resumed": first + run(resumed, STEPS)}))


def train(folder):
    loop = Loop(Fabric(accelerator="cpu", devices=1))
    found = {int(path.stem[5:]): path for path in folder.glob("step-*.pt")}
    if found:
        loop.load(found[max(found)])
    while loop.done < STEPS:
        loop.step()
        if loop.done % SAVE_EVERY == 0:
            loop.save(folder / f"step-{loop.done}.pt")


if __name__ == "__main__":
    trainer_main.main(plain, train)
