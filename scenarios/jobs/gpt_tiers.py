"""The GPT of gpt_ddp.py with two tiers of checkpoints. Each checkpoint goes to the local disk of each node
(--checkpoint-dir/local), with a copy of another rank's part, so that a node that dies takes no state with it. Every
fourth goes to the shared file system too, for the death of several nodes."""

from __future__ import annotations

import io
import json
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import Checkpoints, Rng, digest, log, sync
from gpt_ddp import replicate
from torch.distributed.checkpoint.stateful import Stateful

SHARED_EVERY = 4


class Tiers(Checkpoints):
    """The local disk has folders `step-N` with a file of each rank whose part is here: `rank-R.pt`, and its digest in
    `rank-R.json`, which is written last."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.local, self.saved = self.folder / "local", 0
        self.local.mkdir(parents=True, exist_ok=True)
        self.local_pending: Future[None] | None = None

    def save(self, step: int, parts: dict[str, Stateful]) -> None:
        self.ready(step)
        memory = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, memory)
        self.saved += 1
        if self.saved % SHARED_EVERY == 0:
            super().save(step, parts)
            self.wait()  # its collectives and those of the copies must not mix
        self.local_pending = self.finisher.submit(self._keep, memory.getvalue(), step)

    def wait(self) -> None:
        if self.local_pending is not None:
            pending, self.local_pending = self.local_pending, None
            pending.result()
        super().wait()

    def restore(self, parts: dict[str, Stateful]) -> int:
        """Load the newest checkpoint that is complete: each rank's part is on some node, or on the shared file system.
        Returns the number of steps that were done when it was saved."""
        shared = self._newest() if dist.get_rank() == 0 else None
        here = {"parts": self._whole(), "shared": shared and shared["step"]}
        everywhere: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, here, group=self.group)
        step = max((step for step in _steps(everywhere) if _parts(everywhere, step)), default=0)
        if step <= (everywhere[0]["shared"] or 0):
            return super().restore(parts)
        world = len(_parts(everywhere, step))
        for rank in range(min(world, dist.get_world_size())):
            self._fetch(step, rank, everywhere)
        state = torch.load(self._file(step, dist.get_rank() % world), weights_only=False)
        for name, part in parts.items():
            if world == dist.get_world_size() or not isinstance(part, Rng):
                part.load_state_dict(state[name])
        log(f"step {step} is from the local disks")
        return step

    def _file(self, step: int, rank: int) -> Path:
        return self.local / f"step-{step}" / f"rank-{rank}.pt"

    def _keep(self, mine: bytes, step: int) -> None:
        """Write this rank's part to the local disk, and that of the rank before it, which is on another node."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self._write(step, rank, world, mine)
        if world > 1:
            self._write(step, (rank - 1) % world, world, self._exchange(mine, (rank + 1) % world, (rank - 1) % world))
        for old in sorted(self.local.glob("step-*"), key=lambda path: int(path.name[5:]))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _exchange(self, mine: bytes, to: int, source: int) -> bytes:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        sizes[0][0] = len(mine)
        self._swap(sizes[0], to, sizes[1], source)
        theirs = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._swap(torch.frombuffer(bytearray(mine), dtype=torch.uint8), to, theirs, source)
        return theirs.numpy().tobytes()

    def _swap(self, mine: torch.Tensor, to: int, theirs: torch.Tensor, source: int) -> None:
        sending = dist.isend(mine, to, group=self.group)
        dist.recv(theirs, source, group=self.group)
        assert sending is not None
        sending.wait()

    def _write(self, step: int, rank: int, world: int, data: bytes) -> None:
        path = self._file(step, rank)
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps({"digest": digest(path), "world_size": world}))
        os.replace(beside, path.with_suffix(".json"))
        sync(path.parent)

    def _whole(self) -> dict[int, dict[int, int]]:
        """The parts on this node that are what was written: the number of ranks then, by step and rank."""
        found: dict[int, dict[int, int]] = {}
        for known in self.local.glob("step-*/rank-*.json"):
            step, rank, said = int(known.parent.name[5:]), int(known.stem[5:]), json.loads(known.read_text())
            if self._file(step, rank).exists() and digest(self._file(step, rank)) == said["digest"]:
                found.setdefault(step, {})[rank] = said["world_size"]
        return found

    def _fetch(self, step: int, rank: int, everywhere: list[dict[str, Any]]) -> None:
        """Copy the part of a rank to its node, if it is not there."""
        has = [rank_of for rank_of, one in enumerate(everywhere) if rank in one["parts"].get(step, {})]
        if rank in has:
            return
        data = [self._file(step, rank).read_bytes() if dist.get_rank() == has[0] else None]
        dist.broadcast_object_list(data, src=has[0], group=self.group)
        if dist.get_rank() == rank:
            assert data[0] is not None
            self._write(step, rank, next(iter(everywhere[has[0]]["parts"][step].values())), data[0])


def _steps(everywhere: list[dict[str, Any]]) -> set[int]:
    return {step for one in everywhere for step in one["parts"]}


def _parts(everywhere: list[dict[str, Any]], step: int) -> set[int]:
    """The ranks of a local checkpoint. Empty unless the part of each of them is on some node."""
    found = {rank: world for one in everywhere for rank, world in one["parts"].get(step, {}).items()}
    return set(found) if found and set(found) == set(range(max(found.values()))) else set()


if __name__ == "__main__":
    gpt.train(replicate, Tiers)
