"""The GPT of gpt_ddp.py with its checkpoints in an object store, the bucket `checkpoints` of AWS_ENDPOINT_URL.

A checkpoint is made in --checkpoint-dir, as ever, and copied from there: its manifest last, so that one that has a
manifest is whole. A store that does not answer costs a checkpoint, never the training. Needs s3fs.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gpt
import s3fs
from fault_tolerance import Checkpoints, log
from gpt_ddp import replicate

BUCKET, MANIFEST = "checkpoints", "manifest.json"


class ObjectStore(Checkpoints):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        patience = {"connect_timeout": 2, "read_timeout": 3, "retries": {"max_attempts": 1}}
        self.store = s3fs.S3FileSystem(
            endpoint_url=os.environ["AWS_ENDPOINT_URL"], config_kwargs=patience, use_listings_cache=False
        )

    def _finish(self, writing: Any, partial: Path, step: int) -> None:
        super()._finish(writing, partial, step)
        whole = partial.with_suffix("")
        if whole.exists():  # on rank 0
            names = sorted((path.name for path in whole.iterdir()), key=lambda name: name == MANIFEST)
            try:
                for name in names:
                    self.store.put_file(str(whole / name), f"{BUCKET}/{whole.name}/{name}")
            except Exception as error:  # of the store's library, whatever it raises
                raise OSError(f"{whole.name} did not reach the store: {type(error).__name__}: {error}") from error
            print(f"{whole.name} is in the store", flush=True)

    def _newest(self) -> dict[str, Any] | None:
        """Of the store, not of this machine's disk, which need not be the one that the job was on before."""
        for folder in self._complete():
            shutil.rmtree(folder)
        found = self.store.glob(f"{BUCKET}/step-*/{MANIFEST}")
        for path in sorted(found, key=lambda path: int(path.split("/")[1][5:]), reverse=True)[:1]:
            name = path.split("/")[1]
            log(f"{name} comes from the store")
            (self.folder / name).mkdir()
            for file in [*json.loads(self.store.cat_file(path))["files"], MANIFEST]:
                self.store.get_file(f"{BUCKET}/{name}/{file}", str(self.folder / name / file))
        return super()._newest()


if __name__ == "__main__":
    gpt.train(replicate, ObjectStore)
