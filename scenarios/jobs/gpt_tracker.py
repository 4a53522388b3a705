"""The GPT of gpt_ddp.py, and a file `latest` that names its newest checkpoint, as DeepSpeed and Megatron write it.

The file is written after the checkpoint and is only a hint: the folder decides which checkpoint is the newest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gpt
from fault_tolerance import Checkpoints, log
from gpt_ddp import replicate

TRACKER = "latest"


class Tracked(Checkpoints):
    def _finish(self, writing: Any, partial: Path, step: int) -> None:
        super()._finish(writing, partial, step)
        whole = partial.with_suffix("")
        if whole.exists():  # on rank 0
            beside = self.folder / f"{TRACKER}.partial"
            beside.write_text(whole.name)
            os.replace(beside, self.folder / TRACKER)

    def _newest(self) -> dict[str, Any] | None:
        tracker = self.folder / TRACKER
        named, found = tracker.read_text() if tracker.exists() else "", [path.name for path in self._complete()]
        if named != next(iter(found), ""):
            log(f"{TRACKER} says {named!r}, and the newest whole checkpoint is {found[0] if found else 'none'}")
        return super()._newest()


if __name__ == "__main__":
    gpt.train(replicate, Tracked)
