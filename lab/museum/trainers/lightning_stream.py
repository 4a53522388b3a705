"""Lightning with a stream that is in another order each time it is iterated, saved at the end of each epoch. The stream
counts how often it was iterated, and the checkpoint keeps the count. --counters: the proof compares the counters that
Lightning itself keeps in the checkpoint, and the data are a plain range. --validate: only the validation has a stream,
and the checkpoint is saved before it."""

import json
import logging
import os
import sys

import lightning
import torch
import trainer_main
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

EPOCHS = 3
COUNTERS, VALIDATE = "--counters" in sys.argv, "--validate" in sys.argv
sys.argv = [word for word in sys.argv if word not in ("--counters", "--validate")]
logging.getLogger("lightning").setLevel(logging.ERROR)


class Stream(IterableDataset):
    passes = 0

    def __iter__(self):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.passes))
        self.passes += 1
        yield from order.tolist()


class Net(lightning.LightningModule):
    def __init__(self, stream):
        super().__init__()
        self.net, self.stream, self.seen = nn.Linear(8, 1), stream, []
        self.table = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def forward(self, batch):
        return self.net(self.table[batch]).square().mean()

    def training_step(self, batch, index):
        del index
        self.seen.append(batch.tolist())
        return self(batch)

    def validation_step(self, batch, index):
        del index
        self(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["passes"] = self.stream.passes

    def on_load_checkpoint(self, checkpoint):
        self.stream.passes = checkpoint["passes"]


def fit(folder, epochs=EPOCHS, strategy="auto"):
    lightning.seed_everything(0, verbose=False)
    stream = Stream()
    net = Net(stream)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_top_k=-1, save_last=True,
                                   every_n_train_steps=8 if VALIDATE else None)],
    )  # fmt: skip
    loader = DataLoader(range(32) if COUNTERS or VALIDATE else stream, batch_size=4)
    validation = DataLoader(Stream(), batch_size=4) if VALIDATE else None
    trainer.fit(net, loader, validation, ckpt_path="last" if (folder / "last.ckpt").exists() else None)
    return net.seen


def counters(folder):
    """The names and values of all counters in the newest checkpoint."""
    found = []

    def walk(value, name):
        if isinstance(value, dict):
            for key in sorted(value):
                walk(value[key], f"{name}.{key}")
        else:
            found.append([name, value])

    walk(torch.load(folder / "last.ckpt", weights_only=False)["loops"]["fit_loop"], "fit_loop")
    return found


def plain(folder):
    if COUNTERS:
        for stop in (1, EPOCHS):
            fit(folder / "r", stop)
        fit(folder / "whole")
        print(json.dumps({"whole": counters(folder / "whole"), "resumed": counters(folder / "r")}))
        return
    both = {"whole": fit(folder / "whole"), "resumed": fit(folder / "r", 1) + fit(folder / "r")}
    same = not VALIDATE or counters(folder / "whole") == counters(folder / "r")
    print(json.dumps({**both, "still": [] if same else ["checkpoint_integrity"]}))


def train(folder):
    assert "RANK" in os.environ, "start it by torchrun"
    fit(folder, strategy="ddp")


if __name__ == "__main__":
    trainer_main.main(plain, train)
