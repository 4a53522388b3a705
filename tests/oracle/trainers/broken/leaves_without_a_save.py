"""SIGTERM is a notice: the ranks agree on it after the step, and leave at once. What they did since the last regular
save is lost, though there was time to save it."""

import signal
import sys

import torch
import torch.distributed as dist
from base import main
from whole import Whole


class LeavesWithoutASave(Whole):
    noticed = False

    def __init__(self, args):
        super().__init__(args)
        signal.signal(signal.SIGTERM, self.notice)

    def notice(self, *_):
        self.noticed = True

    def after_step(self):
        super().after_step()
        leave = torch.tensor(float(self.noticed))
        dist.all_reduce(leave)
        if leave:
            sys.exit(75)


main(LeavesWithoutASave)
