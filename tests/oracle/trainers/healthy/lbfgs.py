"""L-BFGS with a line search: it asks for the loss several times in a step, as often as the search needs."""

import torch
import torch.distributed as dist
from base import PARTS, Trainer, main


class ByLBFGS(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.optimizer = torch.optim.LBFGS(
            self.model.parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def step(self, batches):
        parts = zip(*[next(batches) for _ in range(PARTS)], strict=True)
        batch = [torch.cat(part) for part in parts]

        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(self.ddp, batch)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # all ranks must search alike
            return mean / self.world

        loss = self.optimizer.step(closure)
        self.schedule.step()
        self.sampler.position += 1
        return loss.item()


main(ByLBFGS)
