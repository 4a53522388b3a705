"""Prints digests of all tensors and numbers in the newest checkpoint under a folder, as JSON. Needs torch."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch


def flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        raw = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        yield name, f"{value.dtype}{list(value.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    elif isinstance(value, dict):
        for key in value:
            yield from flat(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from flat(one, f"{name}.{number}")
    elif isinstance(value, (int, float, str, bytes)):
        yield name, repr(value)


def load(path: str) -> Any:
    """Loads a file. The job itself wrote it, so loading it runs only code that the job would run too."""
    if os.path.isdir(path):
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, os.path.join(folder, "all.pt"))
            return torch.load(os.path.join(folder, "all.pt"), map_location="cpu", weights_only=False)
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=False)


def parts(top: str) -> Iterator[str]:
    """Yields the checkpoint folders of torch.distributed.checkpoint, and all files outside of them."""
    walked = [(top, [os.path.basename(top)])] if os.path.isfile(top) else [(node[0], node[2]) for node in os.walk(top)]
    sharded = [folder for folder, names in walked if ".metadata" in names]
    yield from sharded
    for folder, names in walked:
        if not any(folder == one or folder.startswith(one + os.sep) for one in sharded):
            yield from (top if folder == top and os.path.isfile(top) else os.path.join(folder, name) for name in names)


def newest(top: str) -> float:
    times = [os.lstat(os.path.join(node[0], name)).st_mtime for node in os.walk(top) for name in node[2]]
    return max(times, default=os.lstat(top).st_mtime)


def summary(root: str) -> dict[str, str]:
    """The digests of the newest readable file or folder under `root`."""
    tops = [os.path.join(root, name) for name in os.listdir(root)] if os.path.isdir(root) else []
    for top in sorted(tops, key=newest, reverse=True):
        found: dict[str, str] = {}
        for path in sorted(parts(top)):
            with suppress(Exception):  # not a checkpoint
                found.update(flat(load(path), os.path.relpath(path, root)))
        if found:
            return found
    return {}


if __name__ == "__main__":
    print(json.dumps(summary(sys.argv[1])))
