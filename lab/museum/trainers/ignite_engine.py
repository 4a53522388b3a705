"""Ignite's Engine with a ConcatScheduler, both resumed from their own states."""

import json
import os

import torch
import torch.distributed as dist
import trainer_main
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import ConcatScheduler, LinearCyclicalScheduler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, PER_EPOCH = 24, 5, 8


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.engine = Engine(self.step)
        first = LinearCyclicalScheduler(self.optimizer, "lr", 1e-2, 2e-2, cycle_size=2 * 14)
        second = LinearCyclicalScheduler(self.optimizer, "lr", 2e-2, 1e-3, cycle_size=2 * 14)
        schedule = ConcatScheduler([first, second], durations=[14])
        self.engine.add_event_handler(Events.ITERATION_STARTED, schedule)
        self.parts = {"engine": self.engine, "model": self.model, "optimizer": self.optimizer, "schedule": schedule}
        self.table = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
        self.seen = []

    def step(self, engine, batch):
        loss = self.wrapped(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        done, rate = engine.state.iteration, self.optimizer.param_groups[0]["lr"]
        self.seen.append([done, engine.state.epoch, rate])
        print(f"step {done} loss {loss.item():.9g} lr {rate:.6g}", flush=True)
        return loss.item()

    def run(self):
        begun = self.engine.state.iteration
        self.engine.run(iter(self.table[begun:]), max_epochs=STEPS // PER_EPOCH, epoch_length=PER_EPOCH)

    def state(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def plain(folder):
    whole, begun, resumed = Loop(), Loop(), Loop()
    whole.run()

    def save(engine):
        if engine.state.iteration == 10:
            torch.save(begun.state(), folder / "saved")

    begun.engine.add_event_handler(Events.ITERATION_COMPLETED, save)
    begun.run()
    resumed.load(torch.load(folder / "saved", weights_only=False))
    resumed.run()
    print(json.dumps({"whole": whole.seen, "resumed": begun.seen[:10] + resumed.seen}))


def train(folder):
    dist.init_process_group("gloo")
    loop = Loop()
    found = {int(path.stem[5:]): path for path in folder.glob("step-*.pt")}
    if found:
        loop.load(torch.load(found[max(found)], weights_only=False))

    def save(engine):
        done = engine.state.iteration
        if done % SAVE_EVERY == 0:
            torch.save(loop.state(), folder / "partial")
            os.replace(folder / "partial", folder / f"step-{done}.pt")

    loop.engine.add_event_handler(Events.ITERATION_COMPLETED, save)
    loop.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer_main.main(plain, train)
