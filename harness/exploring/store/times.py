"""The times of the objects of a state: a job may take the newest object."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torchaos.harness.exploring.operations import Kind, Operation
from torchaos.harness.exploring.tree import Tree


def date_objects(root: Path, tree: Tree, done: Iterable[Operation], began_s: float, now_s: float) -> None:
    """Gives the objects of `tree` in `root` the times at which they were put: as long before `now_s` (since the epoch)
    as they were put before the last of the operations `done`. `began_s`: when the recording began (CLOCK_MONOTONIC)."""
    puts: dict[tuple[str, str | None], float] = {}
    for put in (operation for operation in done if operation.kind is Kind.PUT):
        key = put.path, put.blob if put.size else None
        puts[key] = max(puts.get(key, 0.0), put.ended_s)
    last_s = max(puts.values(), default=began_s)
    for path, content in tree.files.items():
        put_s = puts.get((path, content.extents[0].blob if content.extents else None), began_s)
        os.utime(root / path, (now_s - (last_s - put_s),) * 2)
