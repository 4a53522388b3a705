"""Features that the oldest promised version of Python lacks, and that no other tool here finds."""

from __future__ import annotations

import re

from .conftest import REPOSITORY


def test_every_class_variable_names_its_type() -> None:
    """Python 3.10 can't evaluate a bare ClassVar, and pydantic evaluates the annotations of plans: no run could be
    judged."""
    bare = [
        f"{path.relative_to(REPOSITORY)}: {found[0].strip()}"
        for folder in ("plugin", "harness", "injectors", "assertions")
        for path in (REPOSITORY / folder).rglob("*.py")
        if (found := re.search(r"^ +\w+: (?:typing\.)?ClassVar\b(?!\[).*", path.read_text(), re.MULTILINE))
    ]
    assert bare == []
