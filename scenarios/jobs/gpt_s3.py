"""The GPT of gpt_ddp.py with its checkpoints in an object store, see object_store.py. A checkpoint is made in
--checkpoint-dir, and copied from there. If the store does not answer for PATIENCE_S, a checkpoint is lost, but training
continues.
After a restart the checkpoint comes from the store, not from the disk, because the machine may be another one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpt
from fault_tolerance import Checkpoints, patiently
from gpt_ddp import replicate

COPIER = Path(__file__).with_name("object_store.py")
PATIENCE_S = 40.0  # less than the timeout of a step, for the other ranks wait meanwhile


class ObjectStore(Checkpoints):
    def _finish(self, writing: Any, partial: Path, step: int) -> None:
        super()._finish(writing, partial, step)
        whole = partial.with_suffix("")
        if whole.exists():  # on rank 0
            patiently(lambda: copy("put", whole), PATIENCE_S)
            print(f"{whole.name} is in the store", flush=True)

    def _newest(self) -> dict[str, Any] | None:
        def fetch() -> None:
            for folder in self._complete():
                shutil.rmtree(folder)
            copy("newest", self.folder)

        patiently(fetch, PATIENCE_S)
        return super()._newest()


def copy(what: str, folder: Path) -> None:
    """Copy a folder to or from the store. Raises OSError with the last error message of the store's library."""
    done = subprocess.run([sys.executable, str(COPIER), what, str(folder)], capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise OSError(f"{what} {folder.name}: {(done.stderr.strip().splitlines() or ['it was killed'])[-1]}")


if __name__ == "__main__":
    gpt.train(replicate, ObjectStore)
