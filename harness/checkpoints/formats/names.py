"""What names of files and folders say: which step, finished or not, and what kind of file."""

from __future__ import annotations

import re

_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
NUMBERED = re.compile(r"(?P<word>checkpoint|ckpt|step|iter|iteration)[-_=]?(?P<number>\d+)")
TRACKERS = ("latest", "latest_checkpointed_iteration.txt")  # DeepSpeed's and Megatron's

_UNREAD = (".npz", ".npy", ".h5", ".hdf5", ".msgpack", ".gz", ".zst", ".tar", ".zip", ".gguf", ".onnx", ".params")


def is_torch(name: str) -> bool:
    return name.endswith(_TORCH)


def unread_type(name: str) -> str | None:
    """The type of a file that may hold tensors and for which there is no reader."""
    return next((end for end in _UNREAD if name.lower().endswith(end)), None)


def number_in(name: str) -> int | None:
    found = NUMBERED.search(name)
    return int(found["number"]) if found else None
