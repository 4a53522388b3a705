"""The permit that a server needs before it covers the checkpoint folder: the undo of its mount must be guarded first. A
server whose harness has died gets none. This module is apart from cover.py because servers must start quickly."""

from __future__ import annotations

import sys

PERMIT = "mount\n"


def is_given() -> bool:
    """Waits for the end of the input. Returns whether the folder may be covered."""
    return sys.stdin.read() == PERMIT
