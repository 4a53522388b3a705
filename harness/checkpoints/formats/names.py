"""Reads from the names of files and folders: the step, and whether the checkpoint is finished."""

from __future__ import annotations

import re

UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
MARK = "-unfinished"  # the end of the name of a file that NeMo 2 keeps beside a checkpoint until it is finished
UNKNOWN_LAYOUT = "dir"  # the name of Numbered: a folder that belongs to no other format
NUMBERED = re.compile(  # `ba`: batches, as Composer counts its steps
    r"(?P<word>checkpoint|ckpt|step|iter|iteration|(?<![a-zA-Z])ba)[-_=]?(?P<number>\d+)"
)


def number_in(name: str) -> int | None:
    """The step in the name of a checkpoint. Nanotron and Orbax name a folder by the number alone."""
    found = NUMBERED.search(name)
    number = found["number"] if found else name
    return int(number) if number.isdecimal() else None
