"""The sampler restarts, and each batch begins with something that is no sample: an attention mask of another size."""

import torch
from base import Trainer, main
from torch.utils.data import DataLoader, default_collate


def with_mask(samples):
    x, y = default_collate(samples)
    return {"mask": torch.ones(5, 5).tril(), "x": x, "y": y}


class MaskFirst(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.loader = DataLoader(
            self.loader.dataset, batch_sampler=self.sampler, generator=torch.Generator(), collate_fn=with_mask
        )

    def loss(self, model, batch):
        return super().loss(model, (batch["x"], batch["y"]))

    def load_position(self, position):
        pass


main(MaskFirst)
