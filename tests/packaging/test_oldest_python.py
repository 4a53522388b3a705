"""Features that the oldest promised version of Python lacks, and that no other tool here finds."""

from __future__ import annotations

import ast

import pytest

from .conftest import REPOSITORY

FOLDERS = ("plugin", "harness", "injectors", "assertions")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_class_variable_names_its_type(folder: str) -> None:
    """Python 3.10 can't evaluate a bare ClassVar, and pydantic evaluates the annotations of plans: no run could be
    judged."""
    bare = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in (REPOSITORY / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "ClassVar"
    ]
    assert bare == []
