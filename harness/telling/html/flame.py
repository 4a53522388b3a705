"""A recovery as a flame graph: blocks such as the start of the ranks, and below them their parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchaos.harness.telling.terminal.timeline import STRETCHES, spans, spent_in_words


@dataclass(frozen=True)
class Block:
    """A block of the graph. `left` and `width` in percent of the recovery."""

    words: str
    stretch: str  # decides the colour
    took_s: float
    left: float
    width: float


@dataclass(frozen=True)
class Flame:
    stretches: tuple[Block, ...]
    parts: tuple[Block, ...]


def flame_of(parts: Mapping[str, float | None]) -> Flame | None:
    """The graph of a recovery. None if fewer than two of its parts have a duration, because then there is nothing to
    compare."""
    seen = [span for span in spans(parts) if span.end_s is not None and span.took_s > 0]
    whole_s = max((span.end_s or 0.0 for span in seen), default=0.0)
    if len(seen) < 2:
        return None
    names = {part: name for name, own in STRETCHES.items() for part in own}
    small = []
    for span in seen:
        place = _place(span.begin_s, span.took_s, whole_s)
        small.append(Block(spent_in_words(span.part), _class(names.get(span.part, "")), span.took_s, *place))
    large: list[Block] = []
    for name, own in STRETCHES.items():
        inside = [span for span in seen if span.part in own]
        if inside:
            begin_s = inside[0].begin_s
            took_s = max(span.end_s or 0.0 for span in inside) - begin_s
            large.append(Block(name, _class(name), took_s, *_place(begin_s, took_s, whole_s)))
    return Flame(tuple(large), tuple(small))


def _class(name: str) -> str:
    return name.split(" ")[0]


def _place(begin_s: float, took_s: float, whole_s: float) -> tuple[float, float]:
    return round(100 * begin_s / whole_s, 3), round(100 * took_s / whole_s, 3)
