"""A DDP loop that keeps its checkpoints in an object store, as many write it with boto3: each rank puts its own part,
and then rank 0 puts an object that names the newest checkpoint. With --name-first, rank 0 does that before the parts
are there."""

import argparse
import io

import boto3
import torch
import torch.distributed as dist
from botocore.exceptions import ClientError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NEWEST = "newest"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--store", default="s3://checkpoints/run")
    parser.add_argument("--name-first", action="store_true")
    args = parser.parse_args()
    bucket, _, keys = args.store.removeprefix("s3://").partition("/")
    store = boto3.client("s3")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)

    def get(name):
        return store.get_object(Bucket=bucket, Key=f"{keys}/{name}")["Body"].read()

    def put(name, data):
        store.put_object(Bucket=bucket, Key=f"{keys}/{name}", Body=data)

    start = 0
    try:
        newest = get(NEWEST).decode()
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchKey":
            raise
    else:
        state = torch.load(io.BytesIO(get(f"{newest}/rank-{rank}.pt")))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start = state["step"]
    for step in range(start + 1, args.steps + 1):
        data = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(8, 16, generator=data), torch.randn(8, 1, generator=data)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0:
            if args.name_first and rank == 0:
                put(NEWEST, f"step-{step}".encode())
            part = io.BytesIO()
            torch.save(
                {
                    "step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(),
                }, part,
            )  # fmt: skip
            put(f"step-{step}/rank-{rank}.pt", part.getvalue())
            dist.barrier()
            if not args.name_first and rank == 0:
                put(NEWEST, f"step-{step}".encode())
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
