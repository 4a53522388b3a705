"""The GPT of gpt_ddp.py with a copy of each checkpoint in the memory of another node. A save is over when its copy has
arrived. Until then training goes on, although training and the copy use the same link. To start it:
memory_keeper.py torchrun gpt_mirrored.py ..."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import gpt
import torch.distributed as dist
from fault_tolerance import Checkpoints
from gpt_ddp import replicate
from gpt_memory import keepers
from memory_keeper import Keeper
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful


class Mirrored(Checkpoints):
    def __init__(self, folder: Path, keep: int, timeout: timedelta) -> None:
        super().__init__(folder, keep, timeout)
        self.peer = keepers(self.group)[(dist.get_rank() + 1) % dist.get_world_size()]

    def save(self, step: int, parts: dict[str, Stateful]) -> None:
        self.ready(step)
        partial = self.folder / f"step-{step}.partial"
        writer = Writer(partial, self.peer, step)
        writing = async_save(dict(parts), storage_writer=writer, process_group=self.group)
        self.pending = self.finisher.submit(self._finish, writing, partial, step)


class Writer(FileSystemWriter):
    """Sends what this rank has written to a keeper, too."""

    def __init__(self, folder: Path, keeper: Keeper, step: int) -> None:
        super().__init__(folder)
        self.folder, self.keeper, self.step = folder, keeper, step

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        written.wait()
        rank = dist.get_rank()
        data = b"".join(file.read_bytes() for file in sorted(self.folder.glob(f"__{rank}_*.distcp")))
        self.keeper.put(self.step, rank, data)
        return written


if __name__ == "__main__":
    gpt.train(replicate, Mirrored)
