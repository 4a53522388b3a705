"""A small byte-level GPT that trains on the sources of Python's standard library, for gpt_ddp.py and gpt_fsdp2.py.

If it is killed at any point and started again, it continues with the same losses, bit for bit. fault_tolerance.py has
the parts that this needs; `Run` and `train` use them."""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Callable, ContextManager, Iterator

import self_test
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fault_tolerance import (
    Balance,
    Checkpoints,
    Doubtful,
    Guard,
    ModelState,
    OptimizerState,
    Preemption,
    Rng,
    log,
    replicas_agree,
    watch,
)
from last_save import LastSave
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler

CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 64, 64, 4, 3, 0.1
LEARNING_RATE, WARM_UP, MAX_NORM = 3e-3, 10, 1.0

Parallel = Callable[[nn.Module, torch.device], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of guessing each byte of `text` (batch, CONTEXT + 1) from the bytes before it."""
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, text)

    def embed(self, text: Tensor) -> Tensor:
        x: Tensor = self.token(text[:, :-1]) + self.place(torch.arange(CONTEXT, device=text.device))
        return x

    def loss(self, x: Tensor, text: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


class Text(Dataset[Tensor]):
    """The first megabyte of the standard library's top-level modules, in order of name, cut into samples. `most`: the
    number of samples after which the rest is left out; 0: none is."""

    def __init__(self, most: int = 0) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) > 1 << 20:
                break
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        samples = (len(text) - 1) // CONTEXT
        self.samples = min(most, samples) if most else samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


class GlobalBatches(Sampler[list[int]]):
    """This rank's part of each global batch. The order of all samples depends only on the seed and the epoch, so
    another number of ranks continues with the same global batches. `position`: how many batches were trained on; the
    iterator may have read more. `shares`: how many samples each rank gets; this may change between two batches."""

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        self.samples, self.batch_size, self.seed, self.position = samples, batch_size, seed, 0
        self.shares = [batch_size // dist.get_world_size()] * dist.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.samples // self.batch_size
        for position in count(self.position):
            epoch, batch = divmod(position, per_epoch)
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + epoch))
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield self.share(whole).tolist()

    def share(self, whole: Tensor) -> Tensor:
        begin, own = sum(self.shares[: dist.get_rank()]), self.shares[dist.get_rank()]
        return whole[begin : begin + own]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--adapt", action="store_true", help="save twice as often after each restart")
    parser.add_argument("--last-save", action="store_true", help="save at an exception, and when a step does not end")
    parser.add_argument("--self-test", action="store_true", help="compute what is known before each start")
    parser.add_argument("--keep", type=int, default=3, help="how many checkpoints to keep (default 3)")
    parser.add_argument("--batch-size", type=int, default=24, help="of all ranks together (default 24)")
    parser.add_argument("--samples", type=int, default=0, help="of an epoch (default: all of the text, about 16,000)")
    parser.add_argument("--balance", action="store_true", help="give a rank that is slow fewer samples (on CPUs)")
    parser.add_argument("--slow-report", type=Path, metavar="FILE", help="with --balance: names the slow ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-timeout", type=float, default=60.0, metavar="SECONDS")
    return parser.parse_args()


def start(timeout: timedelta) -> torch.device:
    """Join the process group. Returns the device of this rank."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    return device


def rate(step: int, steps: int) -> float:
    """The factor of the learning rate after `step` steps: a linear warm-up, then a cosine down to a tenth."""
    progress = min(1.0, max(0.0, (step - WARM_UP) / max(1, steps - WARM_UP)))
    return min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * progress))


class Kept:
    """A part of the state, as it was when this was made."""

    def __init__(self, part: Stateful) -> None:
        self.state = copy.deepcopy(part.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Run:
    """All the state that a training step changes, and the step itself. `parts`: the state that a checkpoint has to
    hold. `early`: the parts that a step changes before the weights, as they were when the step began."""

    def __init__(self, args: argparse.Namespace, parallel: Parallel, device: torch.device) -> None:
        torch.manual_seed(args.seed)  # the same parameters on all ranks
        self.model = parallel(GPT().to(device), device)
        torch.manual_seed(args.seed + 1 + dist.get_rank())  # but its own dropout on each rank
        random.seed(args.seed + 1 + dist.get_rank())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(step, args.steps))
        self.guard, text = Guard(), Text(args.samples)
        self.sampler = GlobalBatches(len(text), args.batch_size, args.seed)
        self.balance = Balance(self.sampler.shares, args.slow_report) if args.balance else None
        self.alone_since = time.monotonic()  # since when this rank has waited for no other
        # A generator for the loader alone: otherwise its start takes a number from the stream that dropout draws from.
        self.loader = DataLoader(text, batch_sampler=self.sampler, generator=torch.Generator())
        self.parts: dict[str, Stateful] = {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "schedule": self.schedule,
            "sampler": self.sampler,
            "guard": self.guard,
            "rng": Rng(),
        }
        self.changing = threading.Lock()  # held while the weights change
        self.changes_early = ("guard", "rng") if args.last_save else ()
        self.begin(0)

    def begin(self, done: int) -> None:
        """Begin the next step. `done`: how many steps are done."""
        self.done, self.began = done, time.monotonic()
        self.early: dict[str, Stateful] = {name: Kept(self.parts[name]) for name in self.changes_early}

    def step(self, text: Tensor, notice: Preemption) -> tuple[float, bool, bool]:
        """Do one step. Returns the mean loss over all ranks, and whether any rank was told to leave, and to save.
        Raises RuntimeError at a suspect step."""
        loss, world = self.model(text), dist.get_world_size()
        alone_s = time.monotonic() - self.alone_since
        weight = len(text) * world / self.sampler.batch_size  # 1, if all ranks have equally many samples
        loss.backward(torch.full_like(loss, weight))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        doubts, suspect = self.guard.doubts(loss.item()), self.guard.suspects(loss.item(), norm.item())
        # If one rank knows of a problem, all ranks must know it before the weights change, and all must act alike.
        times = [alone_s if rank == dist.get_rank() else 0.0 for rank in range(world)] if self.balance else ()
        news = torch.tensor(
            [notice.leave, notice.save, suspect, doubts, weight * loss.item(), *times], dtype=torch.float64
        )
        dist.all_reduce(news)
        self.alone_since = time.monotonic()
        if news[2]:
            raise (Doubtful if news[3] else RuntimeError)(
                f"loss {loss.item()} or gradient norm {norm.item()} can't be right, here or on another rank"
            )
        with self.changing:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.sampler.position += 1
            self.begin(self.done + 1)
        if self.balance:
            self.sampler.shares = self.balance.after(news[5:].tolist())
        return news[4].item() / world, bool(news[0]), bool(news[1])


def train(parallel: Parallel, store: type[Checkpoints] = Checkpoints) -> None:
    args = options()
    gc.freeze()  # what was imported stays: no collection looks through it, not even the one at the end
    timeout = timedelta(seconds=args.step_timeout)
    if args.self_test and (wrong := self_test.main()):
        sys.exit(wrong)
    device = start(timeout)
    if args.batch_size % dist.get_world_size():
        sys.exit(f"--batch-size {args.batch_size} can't be shared out evenly among {dist.get_world_size()} ranks")
    run = Run(args, parallel, device)
    checkpoints = store(args.checkpoint_dir, args.keep, timeout)
    watch(timeout)
    run.begin(checkpoints.restore(run.parts))
    log(f"{dist.get_world_size()} ranks on {device.type}, {run.done} of {args.steps} steps done")

    every = args.checkpoint_every
    if args.adapt:
        every = max(1, every >> int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    notice, leave = Preemption(), False
    batches = iter(run.loader)
    last: ContextManager[None] = nullcontext()
    if args.last_save:
        last = LastSave(run, checkpoints, args.step_timeout / 2)
    with last:
        while run.done < args.steps and not leave:
            watch(timeout)
            lr = run.schedule.get_last_lr()[0]
            loss, leave, save = run.step(next(batches).to(device), notice)
            log(f"step {run.done} loss {loss:.9g} lr {lr:.6g}")
            if run.done % every == 0 or run.done == args.steps or leave or save:
                notice.save = False
                checkpoints.ready(run.done)
                if not replicas_agree(run.model, checkpoints.group):
                    raise RuntimeError("the replicas of the parameters differ: a rank has computed something else")
                checkpoints.save(run.done, run.parts)
        checkpoints.wait()
    watch(None)
    log(f"preempted after step {run.done}" if run.done < args.steps else f"done: {run.done} steps")

    dist.barrier()  # no rank may stop the store while another rank still needs it
    dist.destroy_process_group()
    if run.done < args.steps:
        sys.exit(128 + signal.SIGTERM)  # the supervisor of the job should start it again
