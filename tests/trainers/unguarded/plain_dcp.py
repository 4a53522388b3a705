"""DDP with torch.distributed.checkpoint, as tutorials show it: a folder for each save; the newest is loaded as is."""

import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    torch.manual_seed(0)
    x, y = torch.randn(256, 16), torch.randn(256, 1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    args.dir.mkdir(parents=True, exist_ok=True)
    steps = [int(found[1]) for path in args.dir.iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name))]
    done = max(steps, default=0)
    if done:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=args.dir / f"step-{done}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    for step in range(done + 1, args.steps + 1):
        rows = torch.arange(8) + 8 * (2 * step + dist.get_rank())
        loss = nn.functional.mse_loss(model(x[rows % 256]), y[rows % 256])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        if step % args.save_every == 0:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=args.dir / f"step-{step}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
