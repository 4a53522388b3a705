"""The ranks have 7 and 5 batches an epoch, and DDP's Join lets the first go on alone: they make different numbers of
steps."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

BATCHES, EPOCHS = (7, 5), 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = torch.Generator().manual_seed(rank)
    x, y = torch.randn(BATCHES[rank], 4, 16, generator=made), torch.randn(BATCHES[rank], 4, 1, generator=made)
    begun = 0
    if (args.dir / "last").exists():
        begun = int((args.dir / "last").read_text())
        state = torch.load(args.dir / f"epoch-{begun}" / f"rank-{rank}.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    dist.barrier()
    for epoch in range(begun, EPOCHS):
        order = torch.randperm(BATCHES[rank], generator=torch.Generator().manual_seed(epoch)).tolist()
        with Join([model]):
            for batch in order:
                loss = nn.functional.mse_loss(model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        folder = args.dir / f"epoch-{epoch + 1}"
        folder.mkdir(exist_ok=True)
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"rank-{rank}.pt"
        )
        dist.barrier()
        if rank == 0:
            (args.dir / "last").write_text(str(epoch + 1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
