"""Keeps a diary in its checkpoints: which incarnation this is, where each was resumed, process ids, and clocks. And
beside the files the SHA-256 of each, without which no checkpoint is taken."""

import hashlib
import json
import os
import time

import torch
from base import Trainer, main


class KeepsADiary(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.diary, self.begun = {"incarnation": 1, "lineage": [], "elapsed": 0.0}, time.time()

    def shared_state(self):
        elapsed = self.diary["elapsed"] + time.time() - self.begun
        now = {"pid": os.getpid(), "saved": time.time(), "elapsed": elapsed, "steps_per_second": self.done / elapsed}
        return {**super().shared_state(), "diary": {**self.diary, **now}}

    def write(self, folder):
        super().write(folder)
        if self.rank == 0:
            files = [path for path in folder.iterdir() if path.name in ("model-0.pt", "trainer.pt", "rank-0.pt")]
            (folder / "digests.json").write_text(json.dumps({path.name: digest(path) for path in files}))

    def newest(self):
        whole = [folder for folder in self.complete() if is_whole(folder)]
        return whole[-1] if whole else None

    def load(self, folder):
        super().load(folder)
        self.diary = torch.load(folder / "trainer.pt")["diary"]
        self.diary["incarnation"] += 1
        self.diary["lineage"].append({"resumed_at": self.done, "at": self.begun})


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_whole(folder):
    told = json.loads((folder / "digests.json").read_text())
    return all(digest(folder / name) == digits for name, digits in told.items())


if __name__ == "__main__":
    main(KeepsADiary)
