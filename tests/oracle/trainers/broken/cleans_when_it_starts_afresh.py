"""Starts from step 1 where the newest checkpoint can't be loaded, and makes the folder empty first: older checkpoints,
from which it could have resumed, are gone for good."""

import shutil

import torch.distributed as dist
from base import Trainer, main


class CleansWhenItStartsAfresh(Trainer):
    def load(self, folder):
        try:
            super().load(folder)
        except Exception as error:
            print(f"could not load {folder}, starting from scratch: {error}", flush=True)
            dist.barrier()
            if self.rank == 0:
                for old in self.complete():
                    shutil.rmtree(old)
            self.__init__(self.args)


main(CleansWhenItStartsAfresh)
