"""Each folder has the SHA-256 of its files in it. A resume takes the newest folder whose sums are right, and removes
those that are not."""

import hashlib
import json
import shutil

import torch.distributed as dist
from base import Trainer, main


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.pt"))}


class FallsBack(Trainer):
    def write(self, folder):
        super().write(folder)
        dist.barrier()
        if self.rank == 0:
            (folder / "sums.json").write_text(json.dumps(sums(folder)))

    def newest(self):
        if self.rank == 0:
            for folder in self.complete():
                if json.loads((folder / "sums.json").read_text()) != sums(folder):
                    shutil.rmtree(folder)
        dist.barrier()
        return super().newest()


main(FallsBack)
