"""Too noisy for its losses to show it: the weights are drawn without a seed, as in PyTorch's DDP tutorial, so that no
two runs have a loss in common; and they are not put back after a restart."""

import torch
import torch.distributed as dist
from base import Trainer, main


class NoiseLosesWeights(Trainer):
    def __init__(self, args):
        super().__init__(args)
        torch.seed()
        for module in self.model.net:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for weight in self.model.parameters():
            dist.broadcast(weight.data, 0)
        torch.manual_seed(args.seed + 1 + self.rank)

    def load_weights(self, folder):
        pass


if __name__ == "__main__":
    main(NoiseLosesWeights)
