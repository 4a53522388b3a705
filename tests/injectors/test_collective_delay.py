"""The collectives that a delay hits: by operation, group, size and count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchaos.harness.agent.collectives.collective_calls import Call
from torchaos.injectors.collective_delay import Delay

CALLS = [
    ("all_reduce", "dp", 8), ("all_gather", "dp", 64), ("all_reduce", "tp", 64), ("all_reduce", "dp", 64),
    ("broadcast", "tp", 8), ("all_reduce", "dp", 64),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "late"),
    [
        ({}, [0, 1, 2, 3, 4, 5]), ({"operation": "all_reduce"}, [0, 2, 3, 5]), ({"group": "tp"}, [2, 4]),
        ({"min_bytes": 10}, [1, 2, 3, 5]), ({"max_bytes": 10}, [0, 4]), ({"every": 2, "group": "dp"}, [1, 5]),
        ({"operation": "all_reduce", "group": "dp", "min_bytes": 10}, [3, 5]),
    ],
)  # fmt: skip
def test_those_that_are_meant_are_late(given: dict[str, Any], late: list[int]) -> None:
    """The rank waits before these calls, for the time and at most the jitter, and before no other."""
    waits: list[float] = []
    site: Any = SimpleNamespace(lease=SimpleNamespace(sleep=waits.append))
    site.at_collectives = lambda wait: setattr(site, "wait", wait)
    Delay(time=0.2, jitter=0.1, seed=5, **given).apply(site)
    found = []
    for number, (operation, group, size) in enumerate(CALLS):
        before = len(waits)
        site.wait(_call(operation, group, size))
        found += [number] if len(waits) > before else []
    assert found == late
    assert all(0.2 <= seconds <= 0.3 for seconds in waits)


def _call(operation: str, name: str, size: int) -> Call:
    return Call(operation, [torch.empty(size, dtype=torch.uint8)], lambda: SimpleNamespace(group_name=name), None)
