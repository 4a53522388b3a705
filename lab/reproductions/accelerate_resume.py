"""accelerate 1.15.0: three defects of a resume: dropout, the order of a later epoch, and a torn newest checkpoint.

    torchrun --nproc-per-node 2 accelerate_resume.py FOLDER LAST_STEP DROPOUT [IN_SAVE]

Both ranks die in LAST_STEP, and the same command with a later LAST_STEP resumes the job. An epoch has 8 steps.

| dies in | dropout | rank 0 in one go | rank 0 after the resume |
|---|---|---|---|
| step 7, resumes from 5 | 0 | samples and losses of steps 6 to 8 | the same, bit for bit |
| step 7 | 0.2 | losses of steps 6, 7, 8: 0.0676, 0.0290, 0.0680 | 0.0419, 0.0042, 0.2259; samples are right |
| step 12, resumes from 10 | 0 | samples of step 11: 50, 45, 34, 54 | 47, 27, 22, 42: those of step 3, an epoch before |
| the save of step 10 (IN_SAVE) | 0 | | FileNotFoundError: .../checkpoint_1/pytorch_model.bin |

Expected: the third column, and in the last row a resume from step 5: `checkpoint_0` is whole, and is not tried.

Likely causes: `accelerator.py:3839` (the highest number is loaded), `data_loader.py:1246` (the generator of the order
is made anew), `checkpointing.py:139` (only the sampler `SeedableRandomSampler` is saved). Between `load_state` and
the first batch the start of the loader draws from the RNG; with torch.get_rng_state() after load_state() and
torch.set_rng_state() after the first batch, losses are equal. Public reports: accelerate issues 1130, 2016, 2823,
3242; pull requests 4232 and 4233 of September 2026 (closed) describe the cause of the order. Versions: Python 3.11.7,
torch 2.13.0+cpu, accelerate 1.15.0 (newest in November 2026).
"""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, last, dropout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
set_seed(7)
data = TensorDataset(torch.arange(64), torch.randn(64, 16))
model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(dropout), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4, shuffle=True))
set_seed(7, device_specific=True)
start = 0
if os.path.exists(f"{folder}/checkpoints"):
    accelerator.load_state()  # the newest one
    start = 5 * len(os.listdir(f"{folder}/checkpoints"))
    accelerator.project_configuration.iteration = start // 5
epoch, skip = divmod(start, len(loader))  # an epoch has 8 steps
step = start
while True:
    loader.set_epoch(epoch)
    for numbers, x in accelerator.skip_first_batches(loader, skip) if skip else loader:
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.print(step, numbers.tolist(), loss.item(), flush=True)
        if step == last:
            accelerator.wait_for_everyone()
            if len(sys.argv) > 4:
                accelerator.register_save_state_pre_hook(lambda *_: os._exit(0))  # dies in the save
                accelerator.save_state()
            os._exit(0)  # dies
        if step % 5 == 0:
            accelerator.save_state()
    epoch, skip = epoch + 1, 0
