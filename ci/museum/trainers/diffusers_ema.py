"""A plain loop with the EMA of diffusers, which is saved and restored by its own state. No loss depends on it."""

import json
import os

import torch
import torch.distributed as dist
import trainer_main
from diffusers.training_utils import EMAModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY = 24, 5


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ema = EMAModel(self.model.parameters(), decay=0.99, min_decay=0.0)
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
        self.done = 0

    def step(self):
        loss = self.wrapped(self.table[self.done]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ema.step(self.model.parameters())
        self.done += 1
        print(f"step {self.done} loss {loss.item():.9g}", flush=True)

    def save(self, path):
        torch.save({"step": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "ema": self.ema.state_dict()}, f"{path}.partial")  # fmt: skip
        os.replace(f"{path}.partial", path)

    def load(self, path):
        saved = torch.load(path, weights_only=False)
        self.done = saved["step"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.ema.load_state_dict(saved["ema"])


def plain(folder):
    def run(loop, steps):
        seen = []
        while loop.done < steps:
            loop.step()
            seen.append([loop.done, *(round(value, 6) for value in loop.ema.shadow_params[1].tolist())])
        return seen

    begun, resumed = Loop(), Loop()
    first = run(begun, 10)
    begun.save(folder / "saved")
    resumed.load(folder / "saved")
    print(json.dumps({"whole": run(Loop(), STEPS), "resumed": first + run(resumed, STEPS)}))


def train(folder):
    dist.init_process_group("gloo")
    loop = Loop()
    found = {int(path.stem[5:]): path for path in folder.glob("step-*.pt")}
    if found:
        loop.load(found[max(found)])
    while loop.done < STEPS:
        loop.step()
        if loop.done % SAVE_EVERY == 0 or loop.done == STEPS:
            loop.save(folder / f"step-{loop.done}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(plain, train)
