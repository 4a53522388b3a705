"""Plain SGD, which has no step counter of its own."""

import base
import torch


class Trainer(base.Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.optimizer = torch.optim.SGD(self.optimizer.param_groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)


if __name__ == "__main__":
    base.main(Trainer)
