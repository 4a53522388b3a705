"""The GPT of gpt_ddp.py, trained by replicas that outlive each other (torchft). Each is a torchrun of one rank. If one
dies, the others go on; when it is back, one of them gives it their state. There are no checkpoints.

The replicas that take part in a step share out its global batch. So no sample is lost, and the gradient is that of the
same batch, whoever is there."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpt
import torch
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader, Sampler
from torchft import Manager, Optimizer, ProcessGroupGloo

gpt.DROPOUT = 0.0  # what it draws would depend on who is there
LEARNING_RATE, MOMENTUM, TIMEOUT = 0.1, 0.9, timedelta(seconds=30)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="where the replicas see that all have started")
    parser.add_argument("--batch-size", type=int, default=24, help="of all replicas together (default 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--alone",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long a step takes in which a replica is missing",
    )
    return parser.parse_args()


class Shares(Sampler[list[int]]):
    """This replica's share of the step's global batch."""

    def __init__(self, manager: Manager, samples: int, batch_size: int, seed: int) -> None:
        self.manager, self.samples, self.batch_size, self.seed = manager, samples, batch_size, seed

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            epoch, batch = divmod(self.manager.current_step(), self.samples // self.batch_size)
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + epoch))
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield whole[self.place() :: self.many()].tolist()

    def place(self) -> int:
        return self.manager.participating_rank() or 0

    def many(self) -> int:
        """How many replicas take part in the step."""
        return int(self.manager.num_participants())


def add_up(manager: Manager, model: torch.nn.Module) -> None:
    """Adds up the gradients of the replicas that take part. (In torchft 0.2.0, a replica whose model is in its
    DistributedDataParallel dies with the replica for which it waits: an assertion in the hook fails.)"""
    parts = [part for part in model.parameters() if part.grad is not None]
    whole = torch.cat([part.grad.flatten() for part in parts if part.grad is not None])
    manager.allreduce(whole, reduce_op=ReduceOp.SUM).wait()
    for part, total in zip(parts, torch.split(whole, [part.numel() for part in parts]), strict=True):
        part.grad = total.view_as(part)


class State:
    """All that a step changes, in the form in which a replica gives it to another."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self.parts = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def give(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def take(self, found: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(found[name])


def meet(folder: Path) -> None:
    """Waits until all NUM_REPLICA_GROUPS replicas have started, so that they begin together. Each puts a file into
    `folder`. A replica that comes back finds the files of the others, so it does not wait. There is no time-out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"replica-{os.environ['REPLICA_GROUP_ID']}").touch()
    while len(list(folder.glob("replica-*"))) < int(os.environ["NUM_REPLICA_GROUPS"]):
        time.sleep(0.05)


def main() -> None:
    args, replica = options(), os.environ["REPLICA_GROUP_ID"]
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model, text = gpt.GPT(), gpt.Text()
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: gpt.rate(step, args.steps))
    state = State(model, sgd, schedule)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=state.take, state_dict=state.give, min_replica_size=1,
        replica_id=f"replica_{replica}", hostname="localhost", use_async_quorum=False, init_sync=False, timeout=TIMEOUT,
        quorum_timeout=4 * TIMEOUT,
    )  # fmt: skip
    meet(args.dir)  # a lighthouse waits only for replicas whose manager it knows
    train(args, manager, model, Optimizer(manager, sgd), schedule, text)
    manager.shutdown(wait=False)


def train(
    args: argparse.Namespace, manager: Manager, model: torch.nn.Module, optimizer: Optimizer, schedule: Any,
    text: gpt.Text,
) -> None:  # fmt: skip
    shares = Shares(manager, len(text), args.batch_size, args.seed)
    batches = iter(DataLoader(text, batch_sampler=shares, generator=torch.Generator()))
    most = int(os.environ["NUM_REPLICA_GROUPS"])
    while manager.current_step() < args.steps:
        optimizer.zero_grad()  # the replicas agree on who takes part; one that is behind gets the state
        step, share = manager.current_step(), next(batches)
        loss = model(share)
        loss.backward(torch.full_like(loss, len(share) / args.batch_size))
        add_up(manager, model)
        optimizer.step()
        if manager.current_step() == step:
            print(f"step {step + 1} did not take place", flush=True)  # a replica was lost, so the others do it again
            continue
        schedule.step()
        print(f"step {step + 1} loss {loss.item():.9g}, {manager.num_participants()} of {most} replicas", flush=True)
        if manager.num_participants() < most:
            time.sleep(args.alone)
    print(f"done: {args.steps} steps", flush=True)


if __name__ == "__main__":
    main()
