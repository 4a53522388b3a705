"""A plain DDP loop that puts back everything it needs, in methods that the trainers in broken/ and noisy/ change one at
a time. Two ranks, steps of a few milliseconds: what is judged is the resume, not the model.

A checkpoint is a folder `step-N`: `trainer.pt` (what all ranks share), `model-R.pt` (rank R's part of the weights) and
`rank-R.pt` (its random number generators). It is written as `step-N.partial`, and renamed when it is whole.
"""

import argparse
import math
import os
import random
import shutil
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SAMPLES, GLOBAL_BATCH, PARTS = 128, 16, 2  # 8 steps are an epoch; a step is 2 backwards


class Points(Dataset):
    """Numbers with a little noise on them, drawn anew each time: what augmentation is."""

    def __init__(self, augment):
        made = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(SAMPLES, 16, generator=made), torch.randn(SAMPLES, 1, generator=made)
        self.augment = augment

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index] + self.augment * random.gauss(0, 1), self.y[index]


class GlobalBatches:
    """This rank's part of each global batch, in an order that depends on the seed and the epoch alone. `position`
    counts the batches that were trained on."""

    def __init__(self, seed):
        self.seed, self.position, self.world = seed, 0, dist.get_world_size()

    def order(self, epoch):
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + epoch))

    def __iter__(self):
        for position in count(self.position):
            epoch, batch = divmod(position, SAMPLES // GLOBAL_BATCH)
            whole = self.order(epoch)[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
            own = whole[dist.get_rank() :: self.world].tolist()
            yield from (own[part::PARTS] for part in range(PARTS))


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(32, 1),
        )  # fmt: skip
        self.register_buffer("mean", torch.zeros(16))  # of the inputs, for use after training: no loss depends on it

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.net(x)


class Trainer:
    def __init__(self, args):
        self.args, self.folder = args, args.dir
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)  # the same weights on all ranks
        self.model = Model(args.dropout)
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(args.seed + 1 + self.rank)  # but dropout of its own on each
        random.seed(args.seed + 1 + self.rank)
        whole = list(self.model.parameters())
        groups = [
            {"params": [one for one in whole if one.ndim > 1]},
            {"params": [one for one in whole if one.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)
        self.ema = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.sampler = GlobalBatches(args.seed)
        self.loader = DataLoader(Points(args.augment), batch_sampler=self.sampler, generator=torch.Generator())
        self.done, self.last = 0, args.steps

    def rate(self, step):
        """A linear warm-up of 6 steps, then a cosine down to a tenth."""
        progress = min(1.0, max(0.0, (step - 6) / (self.args.steps - 6)))
        return min((step + 1) / 6, 0.55 + 0.45 * math.cos(math.pi * progress))

    @staticmethod
    def options(parser):
        """What a trainer takes beside the options of all."""

    # -- training ------------------------------------------------------------------------------------------------

    def train(self):
        self.resume()
        batches = iter(self.loader)
        while self.done < self.last:
            loss = self.step(batches)
            self.done += 1
            if self.rank == 0:
                rate = self.optimizer.param_groups[0]["lr"]
                print(f"step {self.done} loss {loss:.9g} lr {rate:.6g}", flush=True)
            self.after_step()
        self.finish()

    def step(self, batches):
        loss = 0.0
        for part in range(PARTS):
            with self.ddp.no_sync() if part < PARTS - 1 else torch.enable_grad():
                loss += self.backward(next(batches))
        self.update()
        self.sampler.position += 1
        return loss

    def backward(self, batch):
        loss = self.loss(self.ddp, batch) / PARTS
        self.scaler.scale(loss).backward()
        return loss.item()

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                self.ema[name].lerp_(value, 0.1)

    def after_step(self):
        if self.done % self.args.save_every == 0 or self.done == self.last:
            self.save()

    def finish(self):
        dist.barrier()
        dist.destroy_process_group()

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self):
        final = self.folder / f"step-{self.done}"
        partial = final.with_suffix(".partial")
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        self.write(partial)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self.complete()[: -self.args.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def write(self, folder):
        torch.save(self.mine(), folder / f"model-{self.rank}.pt")
        torch.save(self.own_state(), folder / f"rank-{self.rank}.pt")
        if self.rank == 0:
            torch.save(self.shared_state(), folder / "trainer.pt")

    def mine(self):
        weights = self.weights()
        return {name: weights[name] for name in sorted(weights)[self.part() :: self.world]}

    def weights(self):
        return self.model.state_dict()

    def part(self):
        return self.rank

    def own_state(self):
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def shared_state(self):
        return {
            "step": self.done, "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(), "ema": self.ema, "position": self.sampler.position,
        }  # fmt: skip

    def complete(self):
        """Oldest first."""
        found = {int(path.name[5:]): path for path in self.folder.glob("step-*") if path.name[5:].isdecimal()}
        return [found[step] for step in sorted(found)]

    # -- resuming ------------------------------------------------------------------------------------------------

    def resume(self):
        newest = self.newest()
        dist.barrier()  # nobody saves before everybody has looked
        if newest is not None:
            self.load(newest)

    def newest(self):
        return self.complete()[-1] if self.complete() else None

    def load(self, folder):
        shared = torch.load(folder / "trainer.pt")
        self.load_weights(folder)
        self.load_shared(shared)
        own = folder / f"rank-{self.rank}.pt"
        if own.exists():  # not on a rank that was not there
            self.load_rng(torch.load(own, weights_only=False))

    def load_shared(self, shared):
        self.done = shared["step"]
        self.load_optimizer(shared["optimizer"])
        self.load_schedule(shared["schedule"])
        self.load_scaler(shared["scaler"])
        self.load_ema(shared["ema"])
        self.load_position(shared["position"])

    def load_weights(self, folder):
        weights = {}
        for path in sorted(folder.glob("model-*.pt")):
            weights.update(torch.load(path))
        self.model.load_state_dict(weights)

    def load_optimizer(self, state):
        self.optimizer.load_state_dict(state)

    def load_schedule(self, state):
        self.schedule.load_state_dict(state)

    def load_scaler(self, state):
        self.scaler.load_state_dict(state)

    def load_ema(self, state):
        self.ema = state

    def load_position(self, position):
        self.sampler.position = position

    def load_rng(self, state):
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])


def attempt():
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main(kind=Trainer):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--augment", type=float, default=0.01)
    kind.options(parser)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind(args).train()


if __name__ == "__main__":
    main()
