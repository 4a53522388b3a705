"""Saves the state after the last whole step when a job can't go on: at an exception, and when a step does not end.
Plain PyTorch; copy it.

A rank in trouble can't save alone: the others wait for it in a collective. So each rank has a thread that waits for a
word in the store at which the ranks met. The rank in trouble gives the word, and the threads save together, in a
process group of their own, while the training of the others still waits. Then the job ends, and starts again."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Protocol

import torch.distributed as dist
from fault_tolerance import Checkpoints, Doubtful, replicas_agree
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

LOOK_S, PATIENCE_S = 0.05, 5.0


class Training(Protocol):
    """What LastSave needs to know of the training."""

    model: nn.Module
    done: int  # steps
    began: float  # when this step began, by time.monotonic()
    changing: threading.Lock  # held from the first change of the weights to the end of the step
    parts: dict[str, Stateful]
    early: dict[str, Stateful]  # those parts that a step changes earlier, as they were when it began


class LastSave(threading.Thread):
    """A context manager around the training. `late_s`: a step that takes longer counts as a hang."""

    def __init__(self, training: Training, checkpoints: Checkpoints, late_s: float) -> None:
        super().__init__(daemon=True)
        self.training, self.checkpoints, self.late_s = training, checkpoints, late_s
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
        self.word = f"last save {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.over, self.raises, self.patience_s = False, threading.Event(), PATIENCE_S

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, Doubtful):
            self.raises.set()
            self.give_word(str(error))
        else:
            self.over = True
        self.join()  # a thread in the store while Python ends would abort the process

    def give_word(self, why: str) -> None:
        print(f"rank {dist.get_rank()} can't go on after step {self.training.done}: {why[:200]}", flush=True)
        try:
            self.store.compare_set(self.word, "", str(self.training.done))
        except dist.DistError:
            self.over = True  # the rank with the store is gone

    def run(self) -> None:
        said = "not saved"
        try:
            while not self.store.check([self.word]):
                if self.over:
                    return
                if time.monotonic() - self.training.began > self.late_s:
                    self.give_word(f"a step takes longer than {self.late_s:g} s")
                    self.patience_s = 0.0
                time.sleep(LOOK_S)
            said = "saved" if self.save(int(self.store.get(self.word))) else said
        except RuntimeError as error:  # a rank is gone
            said = f"not saved: {error}"
        print(f"rank {dist.get_rank()}: the last whole step was {said}", flush=True)
        if not self.raises.wait(self.patience_s):  # the rank in trouble ends first, and then others see that it has
            os._exit(1)

    def save(self, step: int) -> bool:
        """Save the state. Returns whether all ranks have saved. The lock is kept, because no step may change what is
        saved. Nothing is saved if replicas differ."""
        whole = self.training.changing.acquire(timeout=PATIENCE_S) and self.training.done == step > 0
        self.checkpoints.ready(step)
        if not self.all_of_us("whole", whole) or not replicas_agree(self.training.model, self.checkpoints.group):
            return False
        if not (self.checkpoints.folder / f"step-{step}").exists():
            self.checkpoints.save(step, {**self.training.parts, **self.training.early})
            self.checkpoints.wait()
        return self.all_of_us("saved", True)

    def all_of_us(self, what: str, ok: bool) -> bool:
        """Whether every rank says yes. A rank that says nothing in time counts as no."""
        number, end = self.store.add(f"{self.word} {what}", int(ok)), time.monotonic() + PATIENCE_S
        while number < dist.get_world_size() and time.monotonic() < end:
            time.sleep(LOOK_S)
            number = self.store.add(f"{self.word} {what}", 0)
        time.sleep(4 * LOOK_S)  # others may still ask the store, which is in one of the ranks
        return number == dist.get_world_size()
