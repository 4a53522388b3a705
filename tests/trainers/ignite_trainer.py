"""Ignite's DeterministicEngine with DDP on two CPU ranks, its Checkpoint handler, and a resume by its load_objects."""

import argparse
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.utils import manual_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(rank, args):
    torch.set_num_threads(1)
    manual_seed(7)
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    sampler = DistributedSampler(data)

    def step(engine, batch):
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"step {engine.state.iteration} loss {loss.item():.9g}", flush=True)
        if engine.state.iteration == args.steps:
            engine.terminate()
        return loss.item()

    engine = DeterministicEngine(step)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda engine: sampler.set_epoch(engine.state.epoch))
    parts = {"engine": engine, "model": model, "optimizer": optimizer, "schedule": schedule}
    saver = Checkpoint(
        parts, DiskSaver(str(args.dir), require_empty=False), n_saved=3,
        global_step_transform=global_step_from_engine(engine, Events.ITERATION_COMPLETED),
    )  # fmt: skip
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=args.save_every), saver)
    found = {int(path.stem.rsplit("_", 1)[1]): path for path in args.dir.glob("checkpoint_*.pt")}
    idist.barrier()
    if found:
        Checkpoint.load_objects(parts, torch.load(found[max(found)], weights_only=False))
    engine.run(DataLoader(data, 8, sampler=sampler), max_epochs=1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(main, args)
