"""The questions about a path that a job can ask a file system. This module is apart from looks.py because the server
that notes the questions is started for each resume, and must start quickly."""

from __future__ import annotations

from enum import Enum


class Ask(str, Enum):
    """A question about a path."""

    KIND = "kind"  # what is there: nothing, a folder, a link and its target, or a file
    IS = "is"  # the same, and the size of a file
    NAMES = "names"  # of what a folder contains, and their kinds
    BYTES = "bytes"  # of a file
    ALL = "all"  # that is in a folder and below it
    CLEARED = "cleared"  # the kinds of names in a folder and below it, without numbers: all of it is then removed
