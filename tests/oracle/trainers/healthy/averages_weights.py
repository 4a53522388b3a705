"""Stochastic weight averaging from step 14 on, with a schedule of its own and batch normalisation, whose statistics are
made anew for the average in the end. The process leaves by os._exit."""

import os
import sys

import torch
from base import main
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from whole import Whole

FROM = 14


class AveragesWeights(Whole):
    def __init__(self, args):
        super().__init__(args)
        torch.manual_seed(args.seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(args.seed + 1 + self.rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, FROM)
        self.level = SWALR(self.optimizer, 2e-3, anneal_epochs=4)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2
        self.average, self.ema = AveragedModel(self.model), {}

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.done < FROM:
            self.schedule.step()
        else:
            self.average.update_parameters(self.model)
            self.level.step()

    def backward(self, batch):
        loss = self.loss(self.ddp, batch) / 2
        loss.backward()
        return loss.item()

    def shared_state(self):
        more = {"average": self.average.state_dict(), "level": self.level.state_dict()}
        return {**super().shared_state(), **more}

    def load_shared(self, shared):
        super().load_shared(shared)
        self.average.load_state_dict(shared["average"])
        self.level.load_state_dict(shared["level"])

    def finish(self):
        if self.rank == 0:
            data = self.loader.dataset
            update_bn(data.x.split(32), self.average)
            torch.save(self.average.module.state_dict(), self.folder / "average.pt")
        super().finish()
        sys.stdout.flush()
        os._exit(0)


main(AveragesWeights)
