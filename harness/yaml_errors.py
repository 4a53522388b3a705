"""PyYAML's syntax errors in words that say what to do."""

from __future__ import annotations

from typing import Any

import yaml

# A piece of PyYAML's text, what to say instead, and whether to point at the start of the construct.
_SAYINGS = (
    ("found character '\\t'", "a tab can't stand here; indent with spaces", False),
    ("cannot start any token", "text can't start with this character; put it in quotes", False),
    ("mapping values are not allowed", "a ':' can't stand here; put text that holds ': ' in quotes, or mend the indentation", False),
    ("expected <block end>", "this can't stand here; put text that starts with {, [ or a quote in quotes as a whole, or mend the indentation", False),
    ("could not find expected ':'", "a ':' is missing after this; write it as 'key: value'", True),
    ("found unexpected end of stream", "the quotes are not closed; close them", True),
    ("expected ',' or '}'", "the mapping in braces is not closed, or a comma is missing; mend it, or put the text in quotes", False),
    ("expected ',' or ']'", "the list in brackets is not closed, or a comma is missing; mend it, or put the text in quotes", False),
    ("found undefined alias", "no anchor of this name comes before the alias; define it with &, or put text that starts with * in quotes", False),
    ("but found another document", "a second document starts here; put each scenario in a file of its own", False),
    ("found unknown escape character", "YAML knows no such escape; use single quotes to write \\ as it is", False),
)  # fmt: skip


def explain(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Index in the text, and what is wrong there."""
    problem = error.problem or "this is not YAML"
    mark: Any = error.problem_mark or error.context_mark
    for piece, what, at_start in _SAYINGS:
        if piece in problem:
            return (error.context_mark if at_start and error.context_mark else mark).index, what
    return (mark.index if mark else 0), f"{' '.join(problem.split())}; mend the YAML"
