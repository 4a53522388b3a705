"""Writes to a console: symbols in its encoding, few colours, and lines that wrap within their own column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.result import Verdict
from torchaos.harness.telling.terminal.text import on_one_line

COLOURS = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "red"}
_NARROWEST = 24  # the fewest columns of a wrapped text


@dataclass(frozen=True)
class Marks:
    passed: str
    failed: str
    inconclusive: str
    error: str
    arrow: str
    dot: str
    bar: str
    bar_starts: str  # right half of a cell
    bar_ends: str  # left half of a cell


_UNICODE = Marks("✔", "✘", "?", "!", "→", "·", "━", "╺", "╸")
_ASCII = Marks("+", "x", "?", "!", "->", "-", "=", "=", "=")
_IN_ASCII = str.maketrans({"→": "->", "×": "x", "…": "...", "–": "-", "≤": "<=", "≥": ">=", "’": "'"})


class Pen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self.width = console.width
        self.marks = _ASCII if console.options.ascii_only else _UNICODE

    def text(self, text: object, style: str = "") -> Text:
        """The text without markup, and without characters that the console's encoding lacks."""
        safe = on_one_line(text)
        if self._console.options.ascii_only:
            safe = safe.translate(_IN_ASCII).encode("ascii", "backslashreplace").decode()
        return Text(safe, style)

    def mark(self, verdict: Verdict) -> Text:
        return Text(getattr(self.marks, verdict.value), f"bold {COLOURS[verdict]}")

    def gap(self) -> None:
        self._console.print()

    def heading(self, title: str, about: str = "") -> None:
        self.gap()
        self.row([(self.text(title, "bold"), len(title) + 1)], self.text(about))

    def row(self, cells: Sequence[tuple[Text, int]], rest: Text, indent: int = 1, most: int = 0) -> None:
        """Prints cells of fixed width, then a text that wraps in its own column. If a cell is too long, the text goes
        below the cells. `most`: the most lines of the text; 0: no limit."""
        head = Text(" " * indent)
        for cell, width in cells:
            head.append_text(cell)
            head.append(" " * max(1, width - cell.cell_len + 1))
        at = indent + sum(width + 1 for _cell, width in cells)
        width = max(_NARROWEST, self.width - at)
        lines = list(rest.wrap(self._console, width))
        if 0 < most < len(lines):
            last = self.text(f"{lines[most - 1].plain[: width - 2].rstrip()}…", str(rest.style))
            lines = [*lines[: most - 1], last]
        if not lines or head.cell_len > at:
            lines.insert(0, Text())
        for number, line in enumerate(lines):
            whole = (Text(" " * at) if number else head).append_text(line)
            whole.rstrip()
            self._print(whole)

    def long_line(self, label: Text, width: int, text: str) -> None:
        """Prints a path or a command. The terminal wraps it, so that it can be copied."""
        self._print(
            Text(" ").append_text(label).append(" " * max(1, width - label.cell_len + 1)).append_text(self.text(text))
        )

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)
