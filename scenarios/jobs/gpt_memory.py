"""The GPT of gpt_fsdp2.py with checkpoints only in memory, and none in a file. Each rank copies its part of the state
to the memory keeper of its node, and to that of the next rank's node. So a node that dies takes no state with it. To
start it: memory_keeper.py torchrun gpt_memory.py ... The number of ranks must stay the same."""

from __future__ import annotations

import io
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import Checkpoints, log
from gpt_fsdp2 import shard
from memory_keeper import PORT, Keeper
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map


class InMemory(Checkpoints):
    """Parts `(step, rank)` in the keepers of the ranks' nodes."""

    def __init__(self, folder: Path, keep: int, timeout: timedelta) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.finisher, self.pending = ThreadPoolExecutor(1), None
        rank, world = dist.get_rank(), dist.get_world_size()
        self.keepers = keepers(self.group)
        self.mine, self.peers = self.keepers[rank], self.keepers[(rank + 1) % world]

    def save(self, step: int, parts: dict[str, Stateful]) -> None:
        """Copy this rank's part, and send it to the keepers in the background of training. All ranks call this."""
        self.ready(step)
        memory = io.BytesIO()
        torch.save(tree_map(local_part, {name: part.state_dict() for name, part in parts.items()}), memory)
        self.pending = self.finisher.submit(self._copy, step, memory.getvalue())

    def _copy(self, step: int, data: bytes) -> None:
        for keeper in dict.fromkeys((self.mine, self.peers)):
            keeper.put(step, dist.get_rank(), data)

    def restore(self, parts: dict[str, Stateful]) -> int:
        """Load the newest step of which each rank's part is in some keeper. Returns the number of steps that were done
        then; 0 if there is none."""
        everywhere: list[list[tuple[int, int]]] = [[] for _ in self.keepers]
        dist.all_gather_object(everywhere, self.mine.parts(), group=self.group)
        step, rank = newest(everywhere), dist.get_rank()
        if step:
            data = self.source(step, rank, everywhere).get(step, rank)
            state = torch.load(io.BytesIO(data), weights_only=False)
            for name, part in parts.items():
                part.load_state_dict(tree_map(as_shard, state[name], part.state_dict()))
            log(f"step {step} is from memory")
        self.mine.forget_after(step)
        dist.barrier(self.group)  # no rank may save before all have forgotten
        return step

    def source(self, step: int, rank: int, everywhere: list[list[tuple[int, int]]]) -> Keeper:
        """A keeper that has a part: that of this node, if it does."""
        has = [keeper for keeper, parts in zip(self.keepers, everywhere, strict=True) if (step, rank) in parts]
        return self.mine if self.mine in has else has[0]


def keepers(group: dist.ProcessGroup) -> list[Keeper]:
    """The keeper of each rank's node. All ranks call this."""
    if PORT not in os.environ:
        sys.exit(
            f"rank {dist.get_rank()}: this node has no memory keeper: run memory_keeper.py torchrun ... on each node"
        )
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, (own_host(), int(os.environ[PORT])), group=group)
    return [Keeper(*address) for address in addresses]


def newest(everywhere: list[list[tuple[int, int]]]) -> int:
    """The newest step of which all parts are in some keeper; 0: there is none. `everywhere`: the parts by rank."""
    found = {part for parts in everywhere for part in parts}
    steps = {step for step, _rank in found}
    return max((step for step in steps if all((step, rank) in found for rank in range(len(everywhere)))), default=0)


def local_part(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def as_shard(part: Any, like: Any) -> Any:
    return DTensor.from_local(part, like.device_mesh, like.placements) if isinstance(like, DTensor) else part


def own_host() -> str:
    """The address of this node in the network of the ranks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    gpt.train(shard, InMemory)
