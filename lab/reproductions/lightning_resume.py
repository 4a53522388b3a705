"""lightning 2.6.6: a resume within an epoch begins the epoch again, and no resume restores the random numbers.

    python lightning_resume.py FOLDER LAST_STEP DROPOUT SAVE_EVERY

One process, without shuffling, so that the samples show their place. An epoch has 8 steps; the job dies in LAST_STEP,
and the same command again resumes it.

| | in one go | resumed |
|---|---|---|
| dropout 0, a checkpoint every 5 steps: samples of steps 11, 12, 13 | 8-11, 12-15, 16-19 | 0-3, 4-7, 8-11 |
| dropout 0.2, a checkpoint every 8 steps: losses of steps 9, 10, 11 | 0.231, 0.081, 0.026 | 0.228, 0.162, 0.064 |

Expected: the numbers of the run in one go. In the second row the samples are right. In both rows the steps before the
death were equal, bit for bit.

Likely cause: `loops/training_epoch_loop.py:249` adds the number of done batches to the count of fetched batches and
skips none; a loader with a state of its own would begin at the right place. `dump_checkpoint`
(`checkpoint_connector.py:415`) saves no state of a random number generator. Known:
https://github.com/Lightning-AI/pytorch-lightning/issues/17543 (2023, closed as "won't fix"). Versions: Python 3.11.7,
torch 2.13.0+cpu, lightning 2.6.6 (newest in November 2026).
"""

import os
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, last, dropout, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(dropout), nn.Linear(64, 1))

    def training_step(self, batch, index):
        loss = self.net(batch[1]).pow(2).mean()
        print(self.global_step + 1, batch[0].tolist(), loss.item(), flush=True)
        if self.global_step + 1 == last:
            os._exit(0)  # dies
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


L.seed_everything(7)
data = TensorDataset(torch.arange(32), torch.randn(32, 16))
trainer = L.Trainer(
    accelerator="cpu", devices=1, max_steps=20, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=every)],
)  # fmt: skip
trainer.fit(Model(), DataLoader(data, 4), ckpt_path="last")  # an epoch has 8 steps
