"""Which room of the harness may import which. import-linter holds the layers in pyproject.toml; these tests cover names
in strings, which it does not see."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, run

PROGRAM = REPOSITORY / "lab" / "import_graph.py"
ROOMS = sorted(path for path in (REPOSITORY / "harness").rglob("__init__.py") if path.parent != REPOSITORY / "harness")
PYPROJECT = """
[[tool.importlinter.contracts]]
containers = ["torchaos.harness"]
layers = [
    "cli",
    "agent",
]
"""


@pytest.mark.slow  # `make check` finds most of them
def test_no_arrow_goes_up() -> None:
    """No room imports one above it: not at the top of a module, not inside a function, not by a name in a string."""
    printed = run(sys.executable, PROGRAM, "--arrows", cwd=REPOSITORY)
    assert "arrows up: 0\n" in printed, printed
    assert "circles: 0\n" in printed, printed


@pytest.mark.parametrize(
    "line",
    ["import torchaos.harness.cli.run", "def f():\n    from ..cli import run", 'F = "torchaos.harness.cli.run:F"'],
)
def test_each_kind_of_arrow_up_is_seen(tmp_path: Path, line: str) -> None:
    """An import, an import inside a function and a name in a string are each found."""
    for room, text in (("agent", line), ("cli", "from torchaos.harness.agent import wire")):
        (tmp_path / "harness" / room).mkdir(parents=True)
        (tmp_path / "harness" / room / "module.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    printed = run(sys.executable, PROGRAM, tmp_path, "--arrows", cwd=tmp_path)
    assert "arrows up: 1\n" in printed
    assert "circles: 1\n" in printed
    assert "agent -> cli (up)" in printed


def test_each_room_says_what_it_is_for() -> None:
    """The first thing in a room is a sentence on what it is for."""
    said = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").rstrip() for path in ROOMS}
    assert [path for path, text in said.items() if not text.endswith((".", ":", "`", ")"))] == []


def test_the_map_names_each_room() -> None:
    """ARCHITECTURE.md has a line for every room."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    rooms = {
        path.name.removesuffix(".py")
        for path in (REPOSITORY / "harness").iterdir()
        if path.name[0] not in "._" and path.name != "py.typed"
    }
    assert [room for room in sorted(rooms) if f"`{room}`" not in text and f"`{room}/`" not in text] == []
