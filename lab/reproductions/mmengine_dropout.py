"""mmengine 0.10.7: a resume begins the random numbers again, so dropout repeats.

    python mmengine_dropout.py whole 0.2 16                                            # in one go
    python mmengine_dropout.py again 0.2 12; python mmengine_dropout.py again 0.2 16  # dies in step 12, resumes from 10

| | losses of steps 11, 12, 13 |
|---|---|
| in one go, dropout 0.2 | 1.3709, 1.6356, 1.5762 |
| resumed, dropout 0.2 | 1.4491, 1.5897, 1.6424 |
| in one go and resumed, dropout 0 | 1.2898, 1.6371, 1.5987, bit for bit the same |

Expected: the numbers of the first row in the second one too.

Likely cause: `save_checkpoint` (`mmengine/runner/runner.py:2215`) saves the seed and no state of a random number
generator; `resume` (line 2051) only compares that seed with the new one. Versions: Python 3.11.7, torch 2.13.0+cpu,
mmengine 0.10.7 (newest in November 2026). We found no public report of MMEngine;
https://github.com/open-mmlab/mmdetection/issues/7508 asks about the seed.
"""

import os
import sys

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
sys.modules["transformers"] = None  # a newer one registers an optimizer twice

import torch
from mmengine.dataset import InfiniteSampler
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(float(sys.argv[2])), nn.Linear(64, 1))

    def forward(self, x, y, mode="loss"):
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


class Losses(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        print(runner.iter + 1, outputs["loss"].item(), flush=True)
        if runner.iter + 1 == int(sys.argv[3]):
            os._exit(0)  # dies


torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
Runner(
    model=Model(),
    work_dir=sys.argv[1],
    resume=True,
    randomness={"seed": 0},
    log_level="ERROR",
    train_dataloader=DataLoader(data, batch_size=16, sampler=InfiniteSampler(data, seed=0)),
    train_cfg={"by_epoch": False, "max_iters": 20},
    optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-2}},
    default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 5}, "logger": None},
    custom_hooks=[Losses()],
    visualizer=None,
    default_scope="mmengine",
).train()
