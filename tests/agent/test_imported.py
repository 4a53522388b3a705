"""The agent notes which modules rank 0 imports."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import os
import first
if not os.fork():
    import forked
    os._exit(0)
os.wait()
import last
"""


@pytest.fixture
def modules(rank: Any) -> None:
    """Modules that no process has imported yet, beside the script."""
    for name in ("first", "forked", "last"):
        (rank.folder / f"{name}.py").write_text("")


@pytest.mark.usefixtures("modules")
def test_the_imports_of_rank_0(rank: Any) -> None:
    """In their order, and without those of a process that the rank forked."""
    ran = rank.run(SCRIPT, hooks=("steps", "imported"))
    assert ran.code == 0, ran.output
    names = (rank.folder / "agent" / "imported").read_text().splitlines()
    assert {"first", "last"} <= set(names)
    assert "forked" not in names
    assert names.index("first") < names.index("last")


@pytest.mark.usefixtures("modules")
def test_other_ranks_note_nothing(rank: Any) -> None:
    """All ranks import the same."""
    ran = rank.run(SCRIPT, hooks=("steps", "imported"), env={"RANK": "1"})
    assert ran.code == 0, ran.output
    assert not (rank.folder / "agent" / "imported").exists()
