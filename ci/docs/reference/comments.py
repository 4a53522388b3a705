"""Reads the comments about a name in the source: those on its own lines, and those on the lines just above."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from types import ModuleType


def of_entries(module: ModuleType, name: str) -> dict[str, str]:
    """The comments on the entries of a dict literal, or on the members of a class, by the last part of their name."""
    text = Path(str(module.__file__)).read_text()
    said = {token.start[0]: token for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT}  # fmt: skip
    found = {}
    for key, node in _entries(ast.parse(text), name):
        first, last = node.lineno, node.end_lineno or node.lineno
        above = first
        while above - 1 in said and not said[above - 1].line.partition("#")[0].strip():
            above -= 1
        lines = [said[number].string.lstrip("# ") for number in range(above, last + 1) if number in said]
        found[key] = " ".join(lines)
    return found


def _entries(tree: ast.Module, name: str) -> list[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [(statement.targets[0].id, statement.value) for statement in node.body
                    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)]  # fmt: skip
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return [(key.attr, value) for key, value in pairs if isinstance(key, ast.Attribute)]
    raise LookupError(f"there is no {name} in {tree}")
