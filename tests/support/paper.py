"""A file for consoles in the tests of the report."""

from __future__ import annotations

import io


class Paper(io.StringIO):
    """A text file in memory that claims the given encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding
