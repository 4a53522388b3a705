"""Parts of a training job that loses nothing when a rank, a node or a disk dies. Plain PyTorch; copy it.

- `Checkpoints`: sharded, written in the background, renamed when they are complete, verified before they are loaded.
- `ModelState`, `OptimizerState`, `Rng`: state that is restored exactly, also on another number of ranks.
- `Preemption`: the notice that a spot machine will be taken away soon. `Guard`: finds numbers that can't be right.
- `Balance`: gives a rank that is slow less work.
- `patiently`: tries again what may fail for a while.
- `replicas_agree`: whether all ranks have the same weights. `watch`: ends a process that hangs.

A job restarts by being started again: `torchrun --max-restarts`, or a scheduler's requeue. With gloo, set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, or most restarts fail to connect (torch 2.13)."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class Checkpoints:
    """Folders `step-N`. A folder of this name is complete: it is written as `step-N.partial`, and renamed when every
    file is on disk and `manifest.json` holds a digest of each file. All ranks see the same file system."""

    def __init__(self, folder: Path, keep: int, timeout: timedelta) -> None:
        self.folder, self.keep = folder, keep
        # A save runs in the background of training. In the same process group, its collectives and those of training
        # would mix.
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.finisher = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for partial in folder.glob("*.partial"):  # an earlier attempt died while it wrote this folder
                shutil.rmtree(partial)

    def ready(self, step: int) -> None:
        """Wait until the last save is over, whether it failed or not: its collectives need the group until then, and
        would mix with those of the training thread."""
        try:
            self.wait()
        except (OSError, CheckpointException) as error:
            print(f"the checkpoint before step {step} failed, training goes on: {error}", flush=True)

    def save(self, step: int, parts: dict[str, Stateful]) -> None:
        """Wait until the last save is over, then copy the state to memory and write it in the background. A failure of
        the last save is printed. All ranks call this."""
        self.ready(step)  # only one save at a time
        partial = self.folder / f"step-{step}.partial"
        writing = async_save(dict(parts), checkpoint_id=partial, process_group=self.group)
        self.pending = self.finisher.submit(self._finish, writing, partial, step)

    def wait(self) -> None:
        """Wait until the last save is complete. Raises the error of that save."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def restore(self, parts: dict[str, Stateful]) -> int:
        """Load the newest valid checkpoint. Returns the number of steps that were done when it was saved; 0 if there is
        none."""
        choice = [self._newest() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(choice, src=0, group=self.group)  # all ranks load the checkpoint that rank 0 found
        manifest = choice[0]
        if manifest is None:
            return 0
        if manifest["world_size"] != dist.get_world_size():  # other ranks need other streams of random numbers
            parts = {name: part for name, part in parts.items() if not isinstance(part, Rng)}
        load(dict(parts), checkpoint_id=self.folder / f"step-{manifest['step']}", process_group=self.group)
        return int(manifest["step"])

    def _finish(self, writing: Any, partial: Path, step: int) -> None:
        writing.result()
        if dist.get_rank() != 0:
            return
        files = {path.name: digest(path) for path in sorted(partial.iterdir())}
        with open(partial / "manifest.json", "w") as file:
            json.dump({"step": step, "world_size": dist.get_world_size(), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(partial)
        partial.rename(partial.with_suffix(""))
        sync(self.folder)
        for old in self._complete()[self.keep :]:
            shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        """The folders `step-N`, newest first."""
        found = {int(path.name[5:]): path for path in self.folder.iterdir() if re.fullmatch(r"step-\d+", path.name)}
        return [found[step] for step in sorted(found, reverse=True)]

    def _newest(self) -> dict[str, Any] | None:
        """The manifest of the newest undamaged checkpoint. Damaged checkpoints are renamed, so that they are not tried
        again."""
        for folder in self._complete():
            try:
                manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
                damaged = [name for name, known in manifest["files"].items() if digest(folder / name) != known]
                if not damaged:
                    return manifest
                problem = f"{', '.join(damaged)} is not what was written"
            except (OSError, ValueError, KeyError) as error:
                problem = str(error)
            aside = folder.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            log(f"{folder.name}: {problem}; going back to an older checkpoint")
        return None


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        summary = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            summary.update(block)
    return summary.hexdigest()


def sync(folder: Path) -> None:
    """Make sure that the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class ModelState:
    """The parameters under plain names, sharded or not, so that DDP and FSDP2 read each other's checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self.model))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class OptimizerState:
    """The optimizer's state by parameter name, so that it can be restored on another number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Rng:
    """The random number generators of this rank. Without them, dropout draws other numbers after a restart."""

    def state_dict(self) -> dict[str, Any]:
        states = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return {f"rank{dist.get_rank()}": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = state[f"rank{dist.get_rank()}"]
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


class Preemption:
    """Remembers a notice until the step is over. SIGTERM: save and leave. SIGUSR1: save and go on, because worse may
    follow. Ranks receive the signal at different times, so they have to agree on it."""

    def __init__(self) -> None:
        self.leave = self.save = False
        signal.signal(signal.SIGTERM, self._notice)
        signal.signal(signal.SIGUSR1, self._notice)

    def _notice(self, signum: int, frame: object) -> None:
        self.leave, self.save = self.leave or signum == signal.SIGTERM, self.save or signum == signal.SIGUSR1


class Doubtful(RuntimeError):
    """The weights may be wrong already, so that this state is not worth a save."""


class Guard:
    """Finds numbers that can't be right: a loss that is not finite or over 1.5 × its rolling mean, or a gradient norm
    over 10 × its own rolling mean. The job then starts again from its checkpoint. A fault in the hardware usually does
    not come back. A fault in the data or the code comes back, and ends the job when its restarts are used up. The means
    are part of the state, so that the guard decides in the same way after a restart."""

    RISE, FACTOR = 1.5, 10.0
    LOSS_MEMORY, MEMORY = 0.99, 0.95  # a loss rises slowly, and its mean must not follow

    def __init__(self) -> None:
        self.mean = self.loss = math.inf  # nothing is refused before there is a mean

    def doubts(self, loss: float) -> bool:
        """Whether the loss can't be right. A wrong loss means that the weights may be wrong already; a wrong gradient
        would only be applied next."""
        return not math.isfinite(loss) or loss > self.RISE * self.loss

    def suspects(self, loss: float, norm: float) -> bool:
        if self.doubts(loss) or not math.isfinite(norm) or norm > self.FACTOR * self.mean:
            return True
        self.loss = self._after(self.loss, loss, self.LOSS_MEMORY)
        self.mean = self._after(self.mean, norm, self.MEMORY)
        return False

    def _after(self, mean: float, value: float, memory: float) -> float:
        return value if math.isinf(mean) else memory * mean + (1 - memory) * value

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.loss = state["mean"], state["loss"]


class Balance:
    """How many samples of a global batch each rank gets. They change if in each of STEPS steps a rank needed FACTOR
    times as long as the fastest one; each rank then gets samples in proportion to its speed. Nothing changes while all
    are equally fast, so that a run can be repeated. `report`: a JSON file for the ranks that were slow, which rank 0
    writes."""

    FACTOR, STEPS = 1.5, 3

    def __init__(self, shares: list[int], report: Path | None = None) -> None:
        self.shares, self.report, self.slow = shares, report, set[int]()
        self.times: list[list[float]] = []  # of the last steps, in seconds, by rank

    def after(self, times: list[float]) -> list[int]:
        """The shares for the next step. `times`: how long each rank took for the last one, without the time for which
        it waited for others. The same on all ranks."""
        self.times = [*self.times, times][-self.STEPS :]
        ranks = range(len(times))
        slow = any(all(one[rank] > self.FACTOR * min(one) for one in self.times) for rank in ranks)
        if slow and len(self.times) == self.STEPS:
            means = [statistics.mean(one[rank] for one in self.times) for rank in ranks]
            self.times.clear()
            speeds = [self.shares[rank] / means[rank] for rank in ranks]
            batch = sum(self.shares)
            self.shares = [max(1, int(batch * speed / sum(speeds))) for speed in speeds]
            self.shares[speeds.index(max(speeds))] += batch - sum(self.shares)
            log(f"steps took {', '.join(f'{one:.3f}' for one in means)} s; samples for each rank: {self.shares}")
            self.tell(speeds)
        return self.shares

    def tell(self, speeds: list[float]) -> None:
        """Report the ranks that need FACTOR times as long for a sample as the fastest one."""
        self.slow |= {rank for rank, speed in enumerate(speeds) if speed * self.FACTOR < max(speeds)}
        if self.report and dist.get_rank() == 0:
            self.report.write_text(json.dumps({"culprits": sorted(self.slow)}))


def patiently(action: Callable[[], None], patience_s: float) -> None:
    """Do something, and if it fails do it again, for `patience_s` seconds. Raises the OSError of the last try."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return action()
        except OSError as error:
            if time.monotonic() > end:
                raise
            print(f"trying again: {error}", flush=True)
            time.sleep(1.0)


def replicas_agree(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether the parameters are equal on all ranks, bit for bit. Sharded parameters have no replica and are left out.
    All ranks call this. If it is called before each checkpoint, the corruption of one rank gets into no checkpoint."""
    whole = [parameter.detach() for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    if not whole:
        return True
    sums = torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in whole]).cpu()
    most = torch.stack([sums, -sums])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return bool((most[0] == -most[1]).all())


def watch(timeout: timedelta | None) -> None:
    """End this process, with the stacks of all its threads, unless this is called again within `timeout` seconds. None:
    stop watching. The process group's timeout ends a rank that waits for others. This ends the rank for which they
    wait. The thread is written in C, so it also works while another thread holds the GIL."""
    faulthandler.cancel_dump_traceback_later()
    if timeout is not None:
        faulthandler.dump_traceback_later(timeout.total_seconds(), exit=True)
