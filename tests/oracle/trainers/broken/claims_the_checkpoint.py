"""Renames the checkpoint before it is loaded, so that no second job takes it. A second death in the load leaves only
that name, for which nobody looks: the next attempt starts from scratch."""

import shutil

import torch.distributed as dist
from base import Trainer, main


class ClaimsTheCheckpoint(Trainer):
    def load(self, folder):
        claimed = self.folder / "resuming"
        if self.rank == 0:
            folder.rename(claimed)
        dist.barrier()
        super().load(claimed)

    def save(self):
        super().save()
        if self.rank == 0:
            shutil.rmtree(self.folder / "resuming", ignore_errors=True)


main(ClaimsTheCheckpoint)
