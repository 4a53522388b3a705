"""The job whose ranks take the median of their gradients."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

OF_RANKS = [[1.0, 2.0, -3.0], [-900.0, 900.0, 900.0], [3.0, 1.0, -1.0]]


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
