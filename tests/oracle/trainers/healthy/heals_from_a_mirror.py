"""Each checkpoint is a folder of two equal files and their SHA-256. A resume puts a damaged file right from the other,
and loads the newest checkpoint all the same."""

import hashlib
import shutil

import torch
import torch.distributed as dist
from base import main
from whole import Whole


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class HealsFromAMirror(Whole):
    def path(self):
        return self.folder / f"step-{self.done}"

    def put(self, state, path):
        partial = path.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        torch.save(state, partial / "main.pt")
        shutil.copyfile(partial / "main.pt", partial / "mirror.pt")
        (partial / "sum").write_text(digest(partial / "main.pt"))
        partial.rename(path)

    def complete(self):
        folders = (path for path in self.folder.glob("step-*") if not path.suffix)
        return sorted(folders, key=lambda path: int(path.name[5:]))

    def load(self, folder):
        if self.rank == 0:
            self.heal(folder, folder / "main.pt", folder / "mirror.pt")
            self.heal(folder, folder / "mirror.pt", folder / "main.pt")
        dist.barrier()
        super().load(folder / "main.pt")

    def heal(self, folder, one, other):
        if digest(one) != (folder / "sum").read_text():
            shutil.copyfile(other, folder / "healed")
            (folder / "healed").rename(one)


main(HealsFromAMirror)
