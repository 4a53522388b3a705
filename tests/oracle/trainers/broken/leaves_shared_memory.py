"""Keeps its data in shared memory that only an orderly end removes: what a killed rank had is still in /dev/shm when
the job is over."""

import mmap
import os

from base import Trainer, main


class LeavesSharedMemory(Trainer):
    def train(self):
        path = f"/dev/shm/oracle-{os.getpid()}"
        with open(path, "w+b") as file:
            file.truncate(1 << 20)
            self.shared = mmap.mmap(file.fileno(), 0)
        super().train()
        os.unlink(path)


main(LeavesSharedMemory)
