"""Saves whenever so many seconds are over since the last time, as long jobs do: at other steps in each run."""

import time

import torch
import torch.distributed as dist
from base import Trainer, main


class SavesByTime(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.saved_s = time.monotonic()

    @staticmethod
    def options(parser):
        parser.add_argument("--every-s", type=float, default=0.3)

    def after_step(self):
        time.sleep(0.04)
        due = torch.tensor(float(time.monotonic() - self.saved_s > self.args.every_s))
        dist.broadcast(due, 0)
        if due:
            self.save()
            self.saved_s = time.monotonic()


main(SavesByTime)
