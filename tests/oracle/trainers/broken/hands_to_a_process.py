"""Hands each checkpoint to a process that was forked at the start, and that writes all of them. After a restart it goes
on from the oldest checkpoint, and with --newest from the newest."""

import copy
import multiprocessing
import os
import queue

import torch
import torch.distributed as dist
from base import Trainer, main


class HandsToAProcess(Trainer):
    @staticmethod
    def options(parser):
        parser.add_argument("--newest", action="store_true")

    def train(self):
        fork = multiprocessing.get_context("fork")
        self.queue = fork.JoinableQueue()
        self.writer = fork.Process(target=self.write_all, daemon=True)
        if self.rank == 0:
            self.writer.start()
        super().train()

    def write_all(self):
        parent = os.getppid()
        while os.getppid() == parent:  # a rank that is killed ends nobody
            try:
                path, state = self.queue.get(timeout=0.2)
            except queue.Empty:
                continue
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            self.queue.task_done()

    def save(self):
        states = [None] * self.world
        dist.all_gather_object(states, self.own_state())
        if self.rank == 0:
            self.queue.join()  # at most one checkpoint is on its way
            state = {"model": self.model.state_dict(), "rng": states, **self.shared_state()}
            self.queue.put((self.folder / f"step-{self.done}.pt", copy.deepcopy(state)))

    def finish(self):
        if self.rank == 0:
            self.queue.join()
        super().finish()

    def newest(self):
        paths = sorted(self.folder.glob("step-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
        return (paths[-1] if self.args.newest else paths[0]) if paths else None

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)
        self.load_rng(state["rng"][self.rank])


main(HandsToAProcess)
