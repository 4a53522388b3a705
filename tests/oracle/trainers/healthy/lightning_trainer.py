"""Lightning's Trainer with DDP on two CPU ranks, and what it does not put back by itself: the place in the epoch, which
the batch sampler keeps, and the random number generators of every rank, which a callback keeps."""

import argparse

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 128, 8


class Batches:
    """This rank's batches of the whole training as one epoch, from `start` on."""

    def __init__(self, seed, steps):
        self.seed, self.steps, self.start = seed, steps, 0

    def __len__(self):
        return self.steps

    def __iter__(self):
        for step in range(self.start, self.steps):
            epoch, batch = divmod(step, SAMPLES // (2 * BATCH))
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + epoch))
            yield order[2 * BATCH * batch :][: 2 * BATCH][dist.get_rank() :: 2].tolist()


class Resume(L.Callback):
    """The generators are gathered, since rank 0 alone writes; they are put back when the first batch is there."""

    def __init__(self, batches):
        self.batches, self.states = batches, None

    def on_save_checkpoint(self, trainer, module, checkpoint):
        states = [None] * trainer.world_size
        dist.all_gather_object(states, torch.get_rng_state())
        checkpoint["rng"] = states

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.batches.start = checkpoint["global_step"]
        self.states = checkpoint["rng"]

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.states is not None:
            torch.set_rng_state(self.states[trainer.global_rank])
            self.states = None


class Model(L.LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=6)
    args = parser.parse_args()
    L.seed_everything(args.seed)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1))
    batches = Batches(args.seed, args.steps)
    every = args.save_every
    keep = ModelCheckpoint(args.dir, save_last=True, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=args.steps, callbacks=[keep, Resume(batches)],
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    loader = DataLoader(data, batch_sampler=batches, generator=torch.Generator())
    trainer.fit(Model(args.steps), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
