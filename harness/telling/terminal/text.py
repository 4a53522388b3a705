"""Makes text from jobs, logs and environments safe to show. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torchaos.harness.record.words import rounded

# Characters that XML 1.0 forbids (https://www.w3.org/TR/xml/#charsets), and characters that a terminal would obey or
# hide: C0 and C1 controls, lone surrogates, non-characters, and the marks that change the direction of writing.
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
    """The text with at most `limit` characters: its beginning and its end, and between them the number of characters
    that are left out."""
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
    """Measured values with the requested values, such as `delay 50.3 ms (asked 50)`. The end of a name gives the
    unit."""
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
