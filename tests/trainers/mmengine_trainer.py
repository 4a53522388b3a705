"""MMEngine's Runner with an iteration-based loop on one CPU rank, its CheckpointHook, and `resume=True`."""

import argparse
import os
import sys

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # its checkpoints hold objects
sys.modules["transformers"] = None  # registers an Adafactor, which newer versions of torch have too

import torch
from mmengine.dataset import InfiniteSampler
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, x, y, mode="tensor"):
        loss = nn.functional.mse_loss(self.net(x), y)
        return {"loss": loss} if mode == "loss" else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the model is made before the runner sets its seed
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    save = {"type": "CheckpointHook", "by_epoch": False, "interval": args.save_every, "max_keep_ckpts": 3}
    Runner(
        model=Model(), work_dir=args.dir, resume=True, randomness={"seed": 0}, log_level="ERROR",
        train_dataloader=DataLoader(data, batch_size=16, sampler=InfiniteSampler(data, shuffle=True, seed=0)),
        train_cfg={"by_epoch": False, "max_iters": args.steps, "val_interval": 1000},
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-2}},
        param_scheduler={"type": "CosineAnnealingLR", "T_max": 100, "by_epoch": False},
        default_hooks={"checkpoint": save, "logger": None, "timer": None},
        visualizer=None, default_scope="mmengine",
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
