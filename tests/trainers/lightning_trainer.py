"""Lightning's Trainer with DDP on two CPU ranks, a ModelCheckpoint every few steps, and `ckpt_path="last"`."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()

    L.seed_everything(7)
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=args.steps,
        logger=CSVLogger(args.dir, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(args.dir, save_last=True, every_n_train_steps=args.save_every)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(data, 8, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main()
