"""MMEngine's Runner with an iteration-based loop and its usual InfiniteSampler, resumed from its newest checkpoint."""

import json
import os
import sys

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # its checkpoints hold objects
sys.modules["transformers"] = None  # registers an Adafactor, which newer versions of torch have too

import torch
import trainer_main
from mmengine.dataset import InfiniteSampler
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 24


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return (torch.tensor(index),)


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(8, 1), []
        self.table = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def forward(self, batch, mode="tensor"):
        del mode
        self.seen.append(batch.tolist())
        return {"loss": self.net(self.table[batch]).square().mean()}


def run(folder, stop=STEPS):
    torch.manual_seed(0)  # the model is made before the runner sets its seed
    net = Net()
    data = Samples()
    runner = Runner(
        model=net, work_dir=str(folder), resume=True, randomness={"seed": 0}, log_level="ERROR",
        train_dataloader=DataLoader(data, batch_size=4, sampler=InfiniteSampler(data, shuffle=True, seed=0)),
        train_cfg={"by_epoch": False, "max_iters": stop, "val_interval": 1000},
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-2}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 5}, "logger": None,
                       "timer": None},  # times in a checkpoint differ from run to run
        visualizer=None, default_scope="mmengine",
    )  # fmt: skip
    runner.train()
    return net.seen


def plain(folder):
    whole = run(folder / "whole")
    print("\n" + json.dumps({"whole": whole, "resumed": run(folder / "r", 10) + run(folder / "r")}))


def train(folder):
    run(folder)  # without a process group: MMEngine's own needs a torch with CUDA


if __name__ == "__main__":
    trainer_main.main(plain, train)
