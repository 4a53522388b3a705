"""Saves checkpoints with each framework, as their users do. Argument: the folder."""

import os
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(16) % 7
        return {"input_ids": tokens, "labels": tokens}


def transformers(folder):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

    config = GPT2Config(vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, save_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    Trainer(model, arguments, train_dataset=Data(), data_collator=default_data_collator).train()
    model.save_pretrained(folder.parent / "sharded" / "step-1", max_shard_size="2KB")


def lightning(folder):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    keep = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, callbacks=[keep], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 4), 2))


def accelerate(folder):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        accelerator.save_state()


def nanogpt(folder):
    """The dict that nanoGPT's train.py saves as ckpt.pt, under its own names."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    folder.mkdir(parents=True)
    for step in (1, 2):
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": {"n_layer": 1},
            "iter_num": step, "best_val_loss": torch.tensor(1.5), "config": {"learning_rate": 6e-4},
        }  # fmt: skip
        torch.save(state, folder / "ckpt.pt")


def hf_dcp(folder):
    """DCP's safetensors form, sharded over two writers by hand: each wrote half of the rows."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state = {"weight": torch.arange(8.0).reshape(4, 2), "bias": torch.ones(4)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / "step-3")), no_dist=True)
    dcp.save(
        state, storage_writer=HuggingFaceStorageWriter(str(folder / "step-4"), save_distributed=True), no_dist=True
    )


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # Accelerate makes a process group of one rank
    root = Path(sys.argv[1])
    for save in (transformers, lightning, accelerate, nanogpt, hf_dcp):
        save(root / save.__name__)
