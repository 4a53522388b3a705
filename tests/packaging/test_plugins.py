"""Plug-ins are found in every kind of installation. In an editable one, a new file needs no new installation."""

from __future__ import annotations

from pathlib import Path

from torchaos.harness import registry

from .conftest import run

NAMES = "from torchaos.harness import registry; print(*(n for g in registry.GROUPS for n in registry.all_of(g)))"
NEW = """
from dataclasses import dataclass

from torchaos.plugin import Condition

@dataclass(frozen=True)
class Never(Condition):
    name = "never"

    def holds(self, events, now_s):
        return False
"""


def test_a_wheel_has_them_all(from_wheel: Path, tmp_path: Path) -> None:
    """What was read from the source text here is found and loaded where only the wheel is."""
    ours = {name for group in registry.GROUPS for name in registry.names(group)}
    assert set(run(from_wheel, "-c", NAMES, cwd=tmp_path).split()) == ours


def test_a_new_file_is_there_at_once(editable: Path, checkout: Path, tmp_path: Path) -> None:
    """A file that is put into the checkout after an editable install is found by the next command."""
    before = run(editable, "-c", NAMES, cwd=tmp_path).split()
    new = checkout / "harness" / "running" / "conditions" / "never.py"
    new.write_text(NEW)
    try:
        after = run(editable, "-m", "torchaos.harness", "list", "conditions", cwd=tmp_path)
    finally:
        new.unlink()
    assert "never" not in before
    assert "\n   never " in after
