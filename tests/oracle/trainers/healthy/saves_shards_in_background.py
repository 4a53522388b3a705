"""FSDP2 with dcp.async_save on a process group of its own. `latest` names a checkpoint two steps later, when its save
is known to be over."""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import EVERY, Sharded, main


class SavesShardsInBackground(Sharded):
    pending = None

    def __init__(self, args):
        super().__init__(args)
        self.aside = dist.new_group(backend="gloo")

    def after_step(self):
        if self.done % EVERY == 0:
            folder = self.folder / f"step_{self.done}"
            saving = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.aside)
            self.pending = saving, folder.name
        elif self.done % EVERY == 2:
            self.wait()

    def wait(self):
        if self.pending is None:
            return
        saving, name = self.pending
        saving.result()
        dist.barrier()
        self.pending = None
        if self.rank == 0:
            (self.folder / "latest.tmp").write_text(name)
            (self.folder / "latest.tmp").rename(self.folder / "latest")

    def finish(self):
        self.wait()
        super().finish()

    def newest(self):
        latest = self.folder / "latest"
        return self.folder / latest.read_text() if latest.exists() else None


main(SavesShardsInBackground)
