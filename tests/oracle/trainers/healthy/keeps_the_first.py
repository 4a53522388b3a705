"""Saves once more at the end, though the checkpoint of that step is there: the second can't be renamed onto the first,
which is kept. Each save holds the time at which it was made."""

import shutil
import time

import torch.distributed as dist
from base import Trainer, main


class KeepsTheFirst(Trainer):
    def save(self):
        final = self.folder / f"step-{self.done}"
        partial = final.with_suffix(".partial")
        if self.rank == 0:
            partial.mkdir(parents=True)
        dist.barrier()
        self.write(partial)
        dist.barrier()
        if self.rank == 0:
            try:
                partial.rename(final)
            except OSError as error:
                print(f"kept the first: {error}", flush=True)
                shutil.rmtree(partial)
        dist.barrier()

    def shared_state(self):
        return {**super().shared_state(), "saved_at": time.time()}

    def finish(self):
        self.save()
        super().finish()


main(KeepsTheFirst)
