"""A plain loop with an optimizer of pytorch_optimizer, which is saved and restored by its own state. --optimizer: its
class, with AdamW inside if it wraps another optimizer. --every: after so many steps Lookahead averages. --schedule:
with a schedule of the learning rate. --library: another package that has the class."""

import importlib
import inspect
import json
import os

import torch
import torch.distributed as dist
import trainer_main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY = 24, 5


class Loop:
    def __init__(self, optimizer, library, every, schedule):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        package = importlib.import_module(library)
        if library == "heavyball":
            package.utils.compile_mode = None
        kind = getattr(package, optimizer)
        accepted = inspect.signature(kind).parameters
        self.sharpness = "base_optimizer" in accepted  # computes the gradients twice
        weights = self.model.parameters()
        if self.sharpness:
            self.optimizer = kind(weights, base_optimizer=torch.optim.AdamW, lr=1e-2)
        elif "optimizer" in accepted:
            self.optimizer = kind(torch.optim.AdamW(weights, lr=1e-2), **({"k": every} if every else {}))
        else:
            self.optimizer = kind(weights)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9) if schedule else None
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
        self.done = 0

    def step(self):
        def gradients():
            self.optimizer.zero_grad()
            loss = (self.wrapped(self.table[self.done]) - 1).square().mean()
            loss.backward()
            return loss

        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        loss = gradients()
        self.optimizer.step(gradients) if self.sharpness else self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        self.done += 1
        print(f"step {self.done} loss {loss.item():.9g}", flush=True)

    def save(self, path):
        state = {"step": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.schedule:
            state["schedule"] = self.schedule.state_dict()
        partial = path.with_name("partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path):
        saved = torch.load(path, weights_only=False)
        self.done = saved["step"]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule:
            self.schedule.load_state_dict(saved["schedule"])


def plain(folder, **kind):
    def run(loop, steps):
        seen = []
        while loop.done < steps:
            loop.step()
            seen.append([loop.done, *loop.model[0].weight[0].tolist()])
        return seen

    begun, resumed = Loop(**kind), Loop(**kind)
    first = run(begun, 10)
    begun.save(folder / "saved")
    resumed.load(folder / "saved")
    print(json.dumps({"whole": run(Loop(**kind), STEPS), "resumed": first + run(resumed, STEPS)}))


def train(folder, **kind):
    dist.init_process_group("gloo")
    loop = Loop(**kind)
    found = {int(path.stem[5:]): path for path in folder.glob("step-*.pt")}
    if found:
        loop.load(found[max(found)])
    while loop.done < STEPS:
        loop.step()
        if loop.done % SAVE_EVERY == 0:
            loop.save(folder / f"step-{loop.done}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(
        plain, train, optimizer={"required": True}, library={"default": "pytorch_optimizer"},
        every={"type": int}, schedule={"action": "store_true"},
    )  # fmt: skip
