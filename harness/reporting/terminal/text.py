"""Makes text from jobs, logs and environments safe to show, and writes to a console: symbols in its encoding, few
colours, and lines that wrap within their own column."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.plan import rounded
from torchaos.harness.record.result import Verdict

# Characters that XML 1.0 forbids (https://www.w3.org/TR/xml/#charsets), and characters that a terminal would obey or
# hide: C0 and C1 controls, lone surrogates, non-characters, and the marks that change the direction of text.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(17))
    + "]"
)


def printable(text: object) -> str:
    """The text with every character that could harm a reader written as an escape, such as `\\x1b`."""
    return _UNSAFE.sub(_escape, str(text).replace("\r\n", "\n"))


def on_one_line(text: object) -> str:
    return " ".join(printable(text).split())


def shortened(text: str, limit: int) -> str:
    """The text with at most `limit` characters: its beginning, the number of characters that were left out, and its
    end."""
    if len(text) <= limit:
        return text
    gap = f" [{len(text) - limit} characters and more left out] "
    kept = max(0, limit - len(gap))
    return (text[: kept - kept // 3] + gap + text[len(text) - kept // 3 :])[:limit]


def value_in_words(name: str, value: Any, seconds: Collection[str] = ()) -> str:
    """A measured value or a bound, short and on one line. It is a duration if its name ends in `_s` or is in
    `seconds`."""
    if isinstance(value, Mapping):
        return "{" + pairs_in_words(value) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        shown = [value_in_words("", one) for one in list(value)[:6]]
        return ", ".join(shown) + (f" and {len(value) - 6} more" if len(value) > 6 else "")
    is_time = (name.endswith("_s") or name in seconds) and isinstance(value, (int, float))
    if is_time and value >= 0.1:
        return rounded(value)
    return _scalar(value) + (" s" if is_time else "")


def pairs_in_words(values: Mapping[str, Any], seconds: Collection[str] = ()) -> str:
    """Values with their names, such as `catch up 6.84 s, lost steps 5`."""
    return ", ".join(f"{name_in_words(name)} {value_in_words(name, value, seconds)}" for name, value in values.items())


def measured_in_words(measured: Mapping[str, Mapping[str, float]]) -> str:
    """Measured values with the values that were requested, such as `delay 50.3 ms (asked 50)`. The end of a name gives
    the unit."""
    units = {"ms": " ms", "percent": " %", "mbit": " Mbit/s"}
    parts = []
    for name, both in measured.items():
        quantity, _, unit = name.rpartition("_")
        parts.append(f"{name_in_words(quantity)} {both['measured']:.4g}{units.get(unit, '')} (asked {both['asked']:g})")
    return ", ".join(parts)


def name_in_words(name: object) -> str:
    return on_one_line(name).removesuffix("_s").replace("_", " ")


def _scalar(value: Any) -> str:
    if value is None:
        return "not seen"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if value == 0 or 1e-4 <= abs(value) < 1e4 else f"{value:.3e}"
    return shortened(on_one_line(value), 120)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
        self.lines = 0  # printed so far
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
        self.lines += 1

    def banner(self, word: str, colour: str, name: str, about: str) -> None:
        """Prints a word as a badge, and then a name with a text about it."""
        badge, named = Text(f" {word} ", f"bold reverse {colour}".strip()), self.text(name, "bold")
        self.gap()
        self.row([(badge, badge.cell_len), (named, named.cell_len + 1)], self.text(about, "dim"), indent=0)

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
        self.lines += 1
