"""Damage to text and JSON, drawn from a `random.Random`, so that Hypothesis and plain loops can both use it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

# Pieces that were traps: control characters, escapes, tags, aliases, brackets, words of YAML 1.1, numbers.
PIECES = (
    b"\0", b"\t", b"\r", b"\n", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\n---\n", b"'", b'"', b'"\\UFFFFFFFF"',
    b'"\\ud800"', b"!!bool x", b"!!python/name:os.system x", b"!!set {a}", b"&a ", b"*a", b"&a [*a]", b"<<: *a",
    b"? ", b": ", b"- ", b"#",
    b"{", b"}", b"[", b"]", b"[" * 500, b"{a: " * 500, b"|", b">", b"%", b"@", b"on", b"null", b"~", b"true",
    b"017", b"10:30", b"1e999", b".nan", b"NaN", b"9" * 5000, b"-1", b"0", b"{run}", b"{nope}", b"{{",
    b"x: 1\n" * 50, b"../../../etc/passwd",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 2**31, 2**62, 2**63, 2**64, 10**300, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "0", "x" * 5000, "\ud800", "\0", "/", "/etc/passwd", "../../../etc/passwd", "/proc/self/mem",
    "/dev/zero", "/dev/stdin", "nan", [], {}, [[]], [None], [1, "a"], {"": None},
    {"kind": "process", "pid": 1, "start_ticks": 0, "action": "end"}, {"kind": "job_processes", "run_id": "PATH"},
)  # fmt: skip


def damaged(raw: bytes, draw: Random) -> bytes:
    """One to three kinds of damage: to bytes, to a value of JSON, or to a value of one line of JSON."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        raw = draw.choice(WAYS)(raw, draw)
    return raw


def _flip(raw: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + bytes((draw.randrange(256),)) + raw[at + 1 :]


def _insert(raw: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + draw.choice(PIECES) + raw[at + draw.choice((0, 0, 1, 5, 12)) :]


def _cut(raw: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + (raw[at + draw.randrange(1, 60) :] if draw.random() < 0.7 else b"")


def _repeat(raw: bytes, draw: Random) -> bytes:
    at, length = draw.randrange(len(raw) + 1), draw.randrange(1, 80)
    return raw[:at] + raw[at : at + length] * draw.choice((2, 3, 50)) + raw[at + length :]


def _line(raw: bytes, draw: Random) -> bytes:
    """Swap two lines, or double or delete one."""
    lines = raw.split(b"\n")
    first, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    if draw.random() < 0.5:
        lines[first], lines[other] = lines[other], lines[first]
    elif draw.random() < 0.5:
        lines.insert(other, lines[first])
    else:
        del lines[first]
    return b"\n".join(lines)


def _value(raw: bytes, draw: Random) -> bytes:
    """Change one value somewhere in the JSON. Flip a byte if it is not JSON."""
    try:
        return _dumped(_changed(json.loads(raw), draw))
    except (ValueError, RecursionError):
        lines = raw.split(b"\n")
        at = draw.randrange(len(lines))
        try:
            lines[at] = _dumped(_changed(json.loads(lines[at]), draw))
        except (ValueError, RecursionError):
            return _flip(raw, draw)
        return b"\n".join(lines)


WAYS: Sequence[Callable[[bytes, Random], bytes]] = (_value, _value, _value, _flip, _insert, _cut, _repeat, _line)


def _changed(value: Any, draw: Random) -> Any:
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return draw.choice(VALUES)
    holder, key = draw.choice(places)
    deed = draw.random()
    if deed < 0.15:
        del holder[key]
    elif deed < 0.25 and isinstance(holder, dict):
        holder[draw.choice(("", "kind", "step", "x", "__class__"))] = holder.pop(key)
    elif deed < 0.4:
        other, its = draw.choice(places)
        holder[key] = copy.deepcopy(other[its])
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    places, open_ = [], [value]
    while open_:
        holder = open_.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            places.append((holder, key))
            open_.append(holder[key])
    return places


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")
