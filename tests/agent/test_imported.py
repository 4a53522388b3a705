"""The agent notes which modules rank 0 imports."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import os
import torch
if not os.fork():
    import colorsys
    os._exit(0)
os.wait()
import decimal
"""


def test_the_imports_of_rank_0(rank: Any) -> None:
    """In their order, and without those of a process that the rank forked."""
    ran = rank.run(SCRIPT, hooks=("steps", "imported"), cold=True)
    assert ran.code == 0, ran.output
    names = (rank.folder / "agent" / "imported").read_text().splitlines()
    assert {"torch", "decimal"} <= set(names)
    assert "colorsys" not in names
    assert names.index("torch") < names.index("decimal")


def test_other_ranks_note_nothing(rank: Any) -> None:
    """All ranks import the same."""
    ran = rank.run(SCRIPT, hooks=("steps", "imported"), env={"RANK": "1"})
    assert ran.code == 0, ran.output
    assert not (rank.folder / "agent" / "imported").exists()
