"""Three stages of a pipeline, with a file for each stage and step. Each stage loads its own newest file, so that a
stage that died in its save goes on from an older step than the others."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    args.dir.mkdir(parents=True, exist_ok=True)
    done = torch.zeros((), dtype=torch.long)
    for newest in sorted(args.dir.glob(f"stage{rank}-*.pt"))[-1:]:
        state = torch.load(newest)
        stage.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done.fill_(state["step"])
    dist.broadcast(done, 0)
    for step in range(int(done) + 1, args.steps + 1):
        numbers = torch.Generator().manual_seed(1000 * args.seed + step)
        batch, target = torch.randn(2, 8, WIDTH, generator=numbers)
        if rank > 0:
            dist.recv(batch, rank - 1)
            batch.requires_grad_()
        made = stage(batch)
        if rank < world - 1:
            dist.send(made.detach(), rank + 1)
            gradient = torch.empty_like(made)
            dist.recv(gradient, rank + 1)
            made.backward(gradient)
        else:
            loss = nn.functional.mse_loss(made, target)
            loss.backward()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        if rank > 0:
            dist.send(batch.grad, rank - 1)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.save_every == 0:
            dist.barrier()
            path = args.dir / f"stage{rank}-{step:05d}.pt"
            partial = path.with_suffix(".partial")
            torch.save({"model": stage.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.rename(path)
    dist.barrier()
    dist.destroy_process_group()


main()
