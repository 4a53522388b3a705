"""Writes each file of a checkpoint as NAME.tmp and gives it its name when it is whole. `latest.pt` is a link to the
newest."""

import torch
import torch.distributed as dist
from flat import Flat, main


class RenamesFiles(Flat):
    def save(self):
        for name, state in self.parts().items():
            partial = self.folder / f"{name}-step-{self.done}.tmp"
            torch.save(state, partial)
            partial.rename(partial.with_suffix(".pt"))
        dist.barrier()
        if self.rank == 0:
            link = self.folder / "latest.new"
            link.symlink_to(f"model-step-{self.done}.pt")
            link.replace(self.folder / "latest.pt")
        dist.barrier()


main(RenamesFiles)
