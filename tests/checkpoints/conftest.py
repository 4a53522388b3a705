"""Checkpoints in each format, written by the formats' own libraries, or by hand if they are tiny."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from torchaos.harness.checkpoints import formats, inventory
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.layout import Checkpoint

STATE = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"step": torch.tensor(7.0), "lr": 0.1, "groups": [{"params": [0, 1]}]},
    "rng": (3, tuple(range(625)), None),
    "epoch": 2,
}


class Kit:
    """Writes checkpoints, damages files and reads what is there."""

    state = STATE

    def dcp(self, folder: Path, state: dict[str, Any] | None = None) -> Path:
        save(dict(state or STATE), checkpoint_id=folder, no_dist=True)
        return folder

    def safetensors(self, path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
        data = b""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (kind, shape, content) in tensors.items():
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return path

    def flip(self, path: Path, at: int, mask: int = 1) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ mask]))

    def layout(self, path: Path) -> Checkpoint:
        files = Local()
        try:
            return formats.read(files, str(path))
        finally:
            files.close()

    def taken(self, root: Path, manifests: Path | None = None) -> list[dict[str, Any]]:
        found = inventory.take(root, manifests)
        assert found["problem"] is None, found
        return list(found["checkpoints"])

    def only(self, root: Path, manifests: Path | None = None) -> dict[str, Any]:
        (found,) = self.taken(root, manifests)
        return found


@pytest.fixture
def kit() -> Kit:
    return Kit()
