"""No loader: batches are cut from a long text at places that a generator draws, and after a restart it draws the first
ones again."""

import torch
from base import Trainer, main


class GetBatchRestarts(Trainer):
    def __init__(self, args):
        super().__init__(args)
        made = torch.Generator().manual_seed(0)
        self.text = torch.randn(4000, generator=made)
        self.places = torch.Generator().manual_seed(args.seed + self.rank)

    def step(self, batches):
        loss = self.backward(self.get_batch()) + self.backward(self.get_batch())
        self.update()
        return loss

    def get_batch(self):
        places = torch.randint(len(self.text) - 17, (4,), generator=self.places).tolist()
        x = torch.stack([self.text[place : place + 16] for place in places])
        return x, torch.stack([self.text[place + 16 : place + 17] for place in places])


main(GetBatchRestarts)
