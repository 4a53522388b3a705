"""A plain DDP loop that keeps a metric of torchmetrics over the whole run, as part of the model's state. No loss
depends on the metric; only the checkpoint holds it."""

import json
import os

import torch
import torch.distributed as dist
import trainer_main
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Accuracy

STEPS, SAVE_EVERY = 24, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.right = nn.Linear(8, 2), Accuracy()
        self.right.persistent(True)


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.wrapped = DistributedDataParallel(self.model.net) if dist.is_initialized() else self.model.net
        self.optimizer = torch.optim.AdamW(self.model.net.parameters(), lr=1e-2)
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(STEPS, 4, 8, generator=draw)
        self.y = torch.randint(0, 2, (STEPS, 4), generator=draw)
        self.done = 0

    def step(self):
        out = self.wrapped(self.x[self.done])
        loss = nn.functional.cross_entropy(out, self.y[self.done])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.right.update(out.detach().softmax(1), self.y[self.done])
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
            seen.append([loop.done, int(loop.model.right.total)])
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
        if loop.done % SAVE_EVERY == 0:
            loop.save(folder / f"step-{loop.done}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(plain, train)
