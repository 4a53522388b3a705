"""Noisy, and broken: after a resume each weight is off by a given part of itself. How small a defect is still found?"""

import torch
from atomics import Atomics
from base import main


class OffByALittle(Atomics):
    @staticmethod
    def options(parser):
        Atomics.options(parser)
        parser.add_argument("--off", type=float, required=True, help="relative, of each weight")

    def load_weights(self, folder):
        super().load_weights(folder)
        signs = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(1 + self.args.off * torch.randn(weight.shape, generator=signs).sign())


main(OffByALittle)
