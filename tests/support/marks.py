"""Tables of pages, each between its two marks: `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write(pages: Sequence[Path], tables: Mapping[str, str]) -> None:
    """Writes each table into each page that has its marks. Raises ValueError for a page with none of the marks."""
    for page in pages:
        text = page.read_text()
        if not any(_begin(name) in text for name in tables):
            raise ValueError(f"{page} has no marks of {', '.join(tables)}")
        page.write_text(filled(text, tables))


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The text with each table between its marks. What is outside of the marks stays."""
    for name, table in tables.items():
        if _begin(name) in text:
            before, _, rest = text.partition(_begin(name))
            text = f"{before}{_begin(name)}\n{table}\n{_end(name)}{rest.partition(_end(name))[2]}"
    return text


def between(text: str, name: str) -> str:
    """The lines between the marks."""
    return text.partition(_begin(name))[2].partition(_end(name))[0]


def _begin(name: str) -> str:
    return f"<!-- {name}: begin -->"


def _end(name: str) -> str:
    return f"<!-- {name}: end -->"
