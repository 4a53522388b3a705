"""torchft with two replicas, a torchrun of one rank each: one that comes back is given weights, optimizer and schedule
by the other, which has gone on meanwhile. No checkpoint. What a replica trains on follows from the step alone.

A step that is made alone takes five seconds, so that the job is not over before the other is back."""

import argparse
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, Optimizer, ProcessGroupGloo

SAMPLES, BATCH = 256, 8


class Batches:
    """This replica's part of the step's global batch."""

    def __init__(self, manager, replica, replicas, seed):
        self.manager, self.replica, self.replicas, self.seed = manager, replica, replicas, seed

    def __iter__(self):
        whole = BATCH * self.replicas
        while True:
            epoch, batch = divmod(self.manager.current_step(), SAMPLES // whole)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + epoch))
            yield order[whole * batch :][:whole][self.replica :: self.replicas].tolist()


def meet(folder, replica, replicas):
    """All begin together, whoever started first; one that comes back finds the others' files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"there-{replica}").touch()
    while len(list(folder.glob("there-*"))) < replicas:
        time.sleep(0.05)


def exchange(manager, net):
    """The mean of the gradients over the replicas that take part. It is taken here, because torchft 0.2.0's own
    DistributedDataParallel lets a replica die with the one that it waits for."""
    for part in net.parameters():
        manager.allreduce(part.grad).wait()


def main(wrap=lambda manager, net: net, exchange=exchange, moments=True):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)  # there are no checkpoints in it
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=1)  # replicas that make a step
    args = parser.parse_args()
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1))
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / args.steps))

    def state():
        return {"net": net.state_dict(), "adam": adam.state_dict(), "schedule": schedule.state_dict()}

    def load(found):
        net.load_state_dict(found["net"])
        adam.load_state_dict(found["adam"] if moments else {**found["adam"], "state": {}})
        schedule.load_state_dict(found["schedule"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load, state_dict=state,
        min_replica_size=args.least, replica_id=f"replica_{replica}", hostname="localhost", use_async_quorum=False,
        timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=120),
    )  # fmt: skip
    meet(args.dir, replica, replicas)  # a lighthouse waits only for replicas whose manager it knows
    model, optimizer = wrap(manager, net), Optimizer(manager, adam)
    batches = iter(DataLoader(data, batch_sampler=Batches(manager, replica, replicas, args.seed)))
    while manager.current_step() < args.steps:
        optimizer.zero_grad()  # the replicas agree on who has a part in which step, and who is given the state
        step = manager.current_step()
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        exchange(manager, net)
        optimizer.step()
        if manager.current_step() == step:
            print(f"replica {replica}: step {step + 1} did not take place", flush=True)
            time.sleep(0.2)
            continue
        schedule.step()
        print(f"replica {replica}: step {step + 1} loss {loss.item():.9g} of {manager.num_participants()}", flush=True)
        if manager.num_participants() < replicas:
            time.sleep(5)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
