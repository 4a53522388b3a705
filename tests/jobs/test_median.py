"""The job whose ranks take the median of their gradients."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.futures import Future

OF_RANKS = [[1.0, 2.0, -3.0], [-900.0, 900.0, 900.0], [3.0, 1.0, -1.0]]


def test_ddp_takes_it_for_its_communication(jobs: None) -> None:
    """torch looks at the types that it names. Of one rank, the median is its own gradient."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = importlib.import_module("gpt_median").by_median(torch.nn.Linear(3, 1), torch.device("cpu"))
        model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 2.0, 3.0]]
    finally:
        dist.destroy_process_group()


def test_one_wrong_rank_of_three_is_borne(monkeypatch: pytest.MonkeyPatch, jobs: None) -> None:
    """Each number is one of a good rank, or lies between those of the two good ones."""
    job = importlib.import_module("gpt_median")

    def all_gather(of_all: list[torch.Tensor], own: torch.Tensor, group: Any, async_op: bool) -> Any:
        done: Future[Any] = Future()
        for place, numbers in zip(of_all, OF_RANKS, strict=True):
            place.copy_(torch.tensor(numbers))
        done.set_result(of_all)
        return SimpleNamespace(get_future=lambda: done)

    monkeypatch.setattr(job.dist, "all_gather", all_gather)
    bucket = SimpleNamespace(buffer=lambda: torch.tensor(OF_RANKS[0]))
    assert job.median(SimpleNamespace(size=lambda: 3), bucket).wait().tolist() == [1.0, 2.0, -1.0]
