"""Reads from the names of files and folders: the step, and whether the checkpoint is finished."""

from __future__ import annotations

import re

UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
UNKNOWN_LAYOUT = "dir"  # the name of Numbered: a folder that belongs to no other format
NUMBERED = re.compile(r"(?P<word>checkpoint|ckpt|step|iter|iteration)[-_=]?(?P<number>\d+)")


def number_in(name: str) -> int | None:
    """The step in the name of a checkpoint. Nanotron and Orbax name a folder by the number alone."""
    found = NUMBERED.search(name)
    number = found["number"] if found else name
    return int(number) if number.isdecimal() else None
