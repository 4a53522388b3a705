"""A policy gradient: its loss is the mean of the advantages, whatever the weights are, and only its gradient depends on
them. The momentum is saved and not put back, which no loss can show."""

import torch
from base import Trainer, main


class ForgetsMomentumOfAPolicy(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def loss(self, model, batch):
        state, action = batch
        reward = state[:, 0] * action[:, 0]
        likely = -(model(state) - action).square()[:, 0]
        return -(torch.exp(likely - likely.detach()) * (reward - reward.mean())).mean()

    def load_optimizer(self, state):
        super().load_optimizer({**state, "state": {}})


main(ForgetsMomentumOfAPolicy)
