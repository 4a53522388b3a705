"""A plain DDP loop, as many write it: all state in one torch.save file, replaced in one step; DistributedSampler."""

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def batches(data, batch_size, start):
    """All batches from global step `start` on, epoch after epoch."""
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True, generator=torch.Generator())
    epoch, skip = divmod(start, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    torch.manual_seed(rank)
    random.seed(rank)

    start, path = 0, args.dir / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, weights_only=False)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"][rank]["torch"])
        random.setstate(state["rng"][rank]["python"])
        start = state["step"]

    stream = batches(data, 8, start)
    for step in range(start + 1, args.steps + 1):
        x, y = next(stream)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        if step % args.save_every == 0:
            rng = [None] * dist.get_world_size()
            dist.all_gather_object(rng, {"torch": torch.get_rng_state(), "python": random.getstate()})
            if rank == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "rng": rng,
                    "step": step,
                }
                torch.save(state, path.with_suffix(".tmp"))
                os.replace(path.with_suffix(".tmp"), path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
