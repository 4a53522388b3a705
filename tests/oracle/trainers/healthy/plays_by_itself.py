"""Reinforcement: the model makes its own data by playing, they go into a buffer, and each step trains on a draw from
it. Buffer, world and generators of each rank are in a pickle beside the checkpoint."""

import pickle
import random

import numpy as np
import torch
import torch.distributed as dist
from base import main
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from whole import Whole


class PlaysByItself(Whole):
    def __init__(self, args):
        super().__init__(args)
        torch.manual_seed(args.seed)
        self.model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(args.seed + 1 + self.rank)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.chance, self.place, self.buffer, self.ema = np.random.default_rng(self.rank), np.zeros(6), [], {}

    def play(self):
        seen = torch.from_numpy(self.place).float()
        with torch.no_grad():
            action = int(torch.multinomial(self.model(seen).softmax(-1), 1))
        self.buffer = [*self.buffer[-63:], (seen, action, float(self.place[action]))]
        self.place = 0.8 * self.place + self.chance.normal(size=6)

    def step(self, batches):
        for _ in range(4):
            self.play()
        seen, action, reward = zip(*(random.choice(self.buffer) for _ in range(8)), strict=True)
        likely = self.ddp(torch.stack(seen)).log_softmax(-1)[range(8), action]
        loss = -(likely * torch.tensor(reward)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    def world_of(self, path):
        return path.with_name(f"{path.stem}-rank{self.rank}.pickle")

    def save(self):
        with open(self.world_of(self.path()), "wb") as file:
            pickle.dump((self.chance, self.place, self.buffer), file)
        dist.barrier()
        super().save()

    def load(self, path):
        super().load(path)
        with open(self.world_of(path), "rb") as file:
            self.chance, self.place, self.buffer = pickle.load(file)


main(PlaysByItself)
