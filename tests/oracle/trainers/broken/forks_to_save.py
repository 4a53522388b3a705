"""Forks a child for each save, so that training goes on meanwhile. The newest file is taken to be the last in the order
of names: step-5.pt comes after step-15.pt. With --by-number it is the newest."""

import os

import torch
import torch.distributed as dist
from base import Trainer, main


class ForksToSave(Trainer):
    child = 0

    @staticmethod
    def options(parser):
        parser.add_argument("--by-number", action="store_true")

    def save(self):
        states = [None] * self.world
        dist.all_gather_object(states, self.own_state())
        if self.rank == 0:
            self.wait()
            self.child = os.fork()
            if self.child == 0:
                self.write_as_child(states)

    def write_as_child(self, states):
        try:
            path = self.folder / f"step-{self.done}.pt"
            state = {"model": self.model.state_dict(), "rng": states, **self.shared_state()}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        finally:
            os._exit(0)

    def wait(self):
        if self.child:
            os.waitpid(self.child, 0)

    def finish(self):
        self.wait()
        super().finish()

    def newest(self):
        paths = sorted(self.folder.glob("step-*.pt"), key=lambda path: path.name)
        if self.args.by_number:
            paths.sort(key=lambda path: int(path.stem.partition("-")[2]))
        return paths[-1] if paths else None

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.load_shared(state)
        self.load_rng(state["rng"][self.rank])


main(ForksToSave)
