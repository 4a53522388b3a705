"""What names of files and folders say: which step, finished or not, and what kind of file."""

from __future__ import annotations

import re

_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
NUMBERED = re.compile(r"(?P<word>checkpoint|ckpt|step|iter|iteration)[-_=]?(?P<number>\d+)")
TRACKERS = ("latest", "latest_checkpointed_iteration.txt")  # DeepSpeed's and Megatron's


def is_torch(name: str) -> bool:
    return name.endswith(_TORCH)


def number_in(name: str) -> int | None:
    found = NUMBERED.search(name)
    return int(found["number"]) if found else None
