"""transformers 5.24.0: a checkpoint without its optimizer is resumed without a message.

    python transformers_missing_file.py

One process and no death: a checkpoint from which one file is removed is resumed.

| removed from `checkpoint-10` | losses of steps 11, 12, 13, 14 |
|---|---|
| in one go, and with nothing removed | 4.718176, 4.717114, 4.715247, 4.709185 |
| `optimizer.pt`, or `scheduler.pt` | 4.718176, 4.717053, 4.715324, 4.709044 |
| `rng_state.pth` | 4.718433, 4.713852, 4.717899, 4.710405 |
| `trainer_state.json` | ends with FileNotFoundError |
| `model.safetensors` | ends with ValueError: Can't find a valid checkpoint |

Expected: an error, or at least a warning, for each of the five. For `optimizer.pt` and `scheduler.pt` no warning was
printed, and neither the optimizer nor the schedule was loaded. For `rng_state.pth`, a message of the level "info" is
not shown by default.

Likely cause: `transformers/trainer.py:3931` loads the two if both files are there, and has no other branch. Versions:
Python 3.11.7, torch 2.13.0+cpu, transformers 5.24.0 (newest in November 2026). We found no public report.
"""

import os
import shutil

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def losses(folder, resume=None):
    set_seed(7)
    shape = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    arguments = TrainingArguments(folder, max_steps=14, save_steps=10, per_device_train_batch_size=4, logging_steps=1,
                                  use_cpu=True, report_to=[], disable_tqdm=True)  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(GPT2Config(**shape)), arguments, train_dataset=Text(),
                      data_collator=default_data_collator)  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-4:]


print("in one go", losses("whole"))
for lost in (None, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors"):
    shutil.rmtree("broken", ignore_errors=True)
    shutil.copytree("whole/checkpoint-10", "broken/checkpoint-10")
    if lost:
        os.remove(f"broken/checkpoint-10/{lost}")
    try:
        print(lost, losses("broken", "broken/checkpoint-10"))
    except Exception as error:
        print(lost, repr(error)[:150])
