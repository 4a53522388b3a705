"""The GPT of gpt_ddp.py, but the ranks take the median of their gradients, number by number, instead of the mean: of
three ranks, one may be wrong. Of an even number of ranks, it is the lower of the two in the middle."""

from typing import Any

import gpt
import torch
import torch.distributed as dist
from gpt_ddp import replicate
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future


def median(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    own = bucket.buffer()
    of_all = [torch.empty_like(own) for _ in range(group.size())]
    gathered: Future[Any] = dist.all_gather(of_all, own, group, async_op=True).get_future()
    return gathered.then(lambda _: torch.stack(of_all).median(0).values)


def by_median(model: nn.Module, device: torch.device) -> nn.Module:
    parallel: Any = replicate(model, device)
    parallel.register_comm_hook(dist.group.WORLD, median)
    return parallel  # type: ignore[no-any-return]


if __name__ == "__main__":
    gpt.train(by_median)
