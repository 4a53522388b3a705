"""Reads from the names of files and folders: the step, and whether the checkpoint is finished."""

from __future__ import annotations

import re

UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
NUMBERED = re.compile(r"(?P<word>checkpoint|ckpt|step|iter|iteration)[-_=]?(?P<number>\d+)")


def number_in(name: str) -> int | None:
    found = NUMBERED.search(name)
    return int(found["number"]) if found else None
