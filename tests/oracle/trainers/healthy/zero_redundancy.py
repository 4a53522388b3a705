"""Each rank keeps the optimizer's moments of a part of the parameters, and trains that part for all (ZeRO, stage 1)."""

import base
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer


class Trainer(base.Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.optimizer = ZeroRedundancyOptimizer(self.optimizer.param_groups, torch.optim.AdamW, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def write(self, folder):
        self.optimizer.consolidate_state_dict(to=0)
        super().write(folder)


if __name__ == "__main__":
    base.main(Trainer)
