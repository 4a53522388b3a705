"""Lightning with a stream that is in another order each time it is iterated, saved at the end of each epoch. The stream
counts how often it was iterated, and the checkpoint keeps the count."""

import argparse
import json
import logging
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

EPOCHS = 3
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

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["passes"] = self.stream.passes

    def on_load_checkpoint(self, checkpoint):
        self.stream.passes = checkpoint["passes"]


def train(folder, epochs=EPOCHS, strategy="auto"):
    lightning.seed_everything(0, verbose=False)
    stream = Stream()
    net = Net(stream)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(dirpath=folder, save_top_k=-1, save_last=True)],
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(net, DataLoader(stream, batch_size=4), ckpt_path="last" if (folder / "last.ckpt").exists() else None)
    return net.seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plain:
        whole = train(options.dir / "whole")
        print(json.dumps({"whole": whole, "resumed": train(options.dir / "r", 1) + train(options.dir / "r")}))
    else:
        assert "RANK" in os.environ, "start it by torchrun"
        train(options.dir, strategy="ddp")
