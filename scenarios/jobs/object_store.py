"""Copies checkpoints to and from the bucket `checkpoints` of AWS_ENDPOINT_URL: object_store.py put|newest FOLDER.

It runs as a separate process, because the libraries draw from Python's random numbers, whose state is part of a
checkpoint. `put` copies a folder `step-N`, its manifest last: a folder that has a manifest is whole. `newest` fetches
the newest into FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import s3fs

BUCKET, MANIFEST = "checkpoints", "manifest.json"
PATIENCE = {"connect_timeout": 2, "read_timeout": 3, "retries": {"max_attempts": 1}}


def put(store: s3fs.S3FileSystem, folder: Path) -> None:
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        store.put_file(str(path), f"{BUCKET}/{folder.name}/{path.name}")


def newest(store: s3fs.S3FileSystem, folder: Path) -> None:
    steps = [int(path.split("/")[1][5:]) for path in store.glob(f"{BUCKET}/step-*/{MANIFEST}")]
    if steps:
        name = f"step-{max(steps)}"
        (folder / name).mkdir()
        for file in [*json.loads(store.cat_file(f"{BUCKET}/{name}/{MANIFEST}"))["files"], MANIFEST]:
            store.get_file(f"{BUCKET}/{name}/{file}", str(folder / name / file))
        print(f"{name} comes from the store", flush=True)


if __name__ == "__main__":
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    files = s3fs.S3FileSystem(endpoint_url=endpoint, config_kwargs=PATIENCE, use_listings_cache=False)
    {"put": put, "newest": newest}[sys.argv[1]](files, Path(sys.argv[2]))
