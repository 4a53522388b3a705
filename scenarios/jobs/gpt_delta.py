"""The GPT of gpt_ddp.py with delta checkpoints, which are small: one checkpoint in FULL_EVERY holds everything, and
each of the others only the bits that have changed since the one before. A checkpoint is loaded only if all checkpoints
on which it builds are as they were written."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import Checkpoints, Rng, digest, log, sync
from gpt_ddp import replicate
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

FULL_EVERY = 5


class Deltas(Checkpoints):
    """Folders `step-N` with a file of each rank, and `manifest.json`, which is written last. `base`: the folder of the
    checkpoint before; None: this one holds everything."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last: dict[str, Any] = {}  # the state that was saved last
        self.base: str | None = None
        self.links = 0  # since the last checkpoint that holds everything

    def save(self, step: int, parts: dict[str, Stateful]) -> None:
        """Returns when the checkpoint is complete: a delta is small. All ranks call this."""
        state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        full = self.base is None or self.links == FULL_EVERY - 1
        partial = self.folder / f"step-{step}.partial"
        partial.mkdir(exist_ok=True)
        file = partial / f"rank-{dist.get_rank()}.pt"
        torch.save({"base": None if full else self.base, "state": state if full else changed(self.last, state)}, file)
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest(file), group=self.group)
        if dist.get_rank() == 0:
            self._finish_delta(partial, step, None if full else self.base, digests)
        self.last, self.base, self.links = state, f"step-{step}", 0 if full else self.links + 1

    def _finish_delta(self, partial: Path, step: int, base: str | None, digests: list[str]) -> None:
        files = {f"rank-{rank}.pt": made for rank, made in enumerate(digests)}
        text = json.dumps({"step": step, "world_size": len(files), "base": base, "files": files}, indent=1)
        with open(partial / "manifest.json", "w") as manifest:
            manifest.write(text)
            manifest.flush()
            os.fsync(manifest.fileno())
        sync(partial)
        partial.rename(partial.with_suffix(""))
        sync(self.folder)
        complete = self._complete()
        full = [place for place, folder in enumerate(complete) if read(folder)["base"] is None]
        for old in complete[full[self.keep - 1] + 1 :] if len(full) >= self.keep else ():
            shutil.rmtree(old)

    def restore(self, parts: dict[str, Stateful]) -> int:
        """Load the newest checkpoint whose chain is whole. Returns the number of steps that were done when it was
        saved."""
        choice = [self._newest() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(choice, src=0, group=self.group)
        manifest = choice[0]
        if manifest is None:
            return 0
        mine, state = dist.get_rank() % manifest["world_size"], None
        for name in manifest["chain"]:
            link = torch.load(self.folder / name / f"rank-{mine}.pt", weights_only=False)["state"]
            state = link if state is None else changed(state, link)
        assert state is not None
        last = copy.deepcopy(state)  # a part may go on with the tensors that it loads
        for name, part in parts.items():
            if manifest["world_size"] == dist.get_world_size() or not isinstance(part, Rng):
                part.load_state_dict(state[name])
        if manifest["world_size"] == dist.get_world_size():  # otherwise the next one holds everything
            self.last, self.base, self.links = last, f"step-{manifest['step']}", len(manifest["chain"]) - 1
        return int(manifest["step"])

    def _newest(self) -> dict[str, Any] | None:
        """The manifest of the newest checkpoint whose chain is whole, with the names in the `chain`, the one that holds
        everything first. The others are renamed, so that they are not tried again."""
        for folder in self._complete():
            try:
                return {**read(folder), "chain": self.chain(folder.name)}
            except (OSError, ValueError, KeyError) as error:
                log(f"{folder.name}: {error}; going back to an older checkpoint")
            aside = folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        return None

    def chain(self, name: str) -> list[str]:
        """Raises an error if a file of a link is missing, or is not as it was written."""
        manifest = read(self.folder / name)
        for file, known in manifest["files"].items():
            if digest(self.folder / name / file) != known:
                raise ValueError(f"{file} of {name} is not what was written")
        return [*(self.chain(manifest["base"]) if manifest["base"] else []), name]


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def changed(old: Any, new: Any) -> Any:
    """The bits of each float32 tensor that differ; everything else as it is in `new`. Called again on the result, it
    gives `new` back."""
    before, (after, tree) = dict(tree_flatten_with_path(old)[0]), tree_flatten_with_path(new)
    return tree_unflatten([_bits(before.get(path), now) for path, now in after], tree)


def _bits(was: Any, now: Any) -> Any:
    if not (isinstance(was, Tensor) and isinstance(now, Tensor)) or was.shape != now.shape:
        return now
    if was.dtype is torch.float32 and now.dtype in (torch.float32, torch.int32):
        differ = was.view(torch.int32) ^ now.view(torch.int32)
        return differ if now.dtype is torch.float32 else differ.view(torch.float32)
    return now


if __name__ == "__main__":
    gpt.train(replicate, Deltas)
