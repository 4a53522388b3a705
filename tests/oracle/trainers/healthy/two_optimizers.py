"""Matrices by one optimizer and vectors by another, after one backward: the shape of Muon beside AdamW."""

import torch
from base import Trainer, main


class TwoOptimizers(Trainer):
    def __init__(self, args):
        super().__init__(args)
        whole = list(self.model.parameters())
        self.optimizer = torch.optim.SGD([one for one in whole if one.ndim > 1], lr=1e-2, momentum=0.9)
        self.second = torch.optim.AdamW([one for one in whole if one.ndim <= 1], lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def update(self):
        self.scaler.unscale_(self.second)
        self.scaler.step(self.second)
        self.second.zero_grad()
        super().update()

    def shared_state(self):
        return {**super().shared_state(), "second": self.second.state_dict()}

    def load(self, folder):
        super().load(folder)
        self.second.load_state_dict(torch.load(folder / "trainer.pt")["second"])


main(TwoOptimizers)
