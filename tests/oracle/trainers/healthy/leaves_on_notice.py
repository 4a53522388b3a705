"""SIGTERM is a notice: the ranks agree on it after the step, save at once, and leave with an exit code that makes
torchrun start them again."""

import signal
import sys

import torch
import torch.distributed as dist
from base import main
from whole import Whole


class LeavesOnNotice(Whole):
    noticed = False

    def __init__(self, args):
        super().__init__(args)
        signal.signal(signal.SIGTERM, self.notice)

    def notice(self, *_):
        self.noticed = True

    def after_step(self):
        leave = torch.tensor(float(self.noticed))
        dist.all_reduce(leave)
        if leave:
            self.save()
            sys.exit(75)
        super().after_step()


main(LeavesOnNotice)
