"""Reads one line of a journal, and finds events that are missing. A line is damaged if a value has another type than in
`wire.PAYLOADS`. Each writer numbers its events 0, 1, 2, ..."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from torchaos.harness.protocol.packed_lines import is_packed
from torchaos.harness.protocol.wire import PAYLOADS, Event, Kind

# Reads one line of a journal. A line is damaged if a value has another type than in `wire.PAYLOADS`. Ranks may die
# while they write, disks may be full, and run directories are copied, so every line may be damaged.

# The names that `wire.PAYLOADS` uses.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # no pid, step or count is larger
Sum = Annotated[str, Field(pattern=r"^([a-z]+[0-9.]*-)?[0-9a-f]{16}$")]
KindAndSum = Annotated[tuple[str, Sum], Field(strict=False)]  # strict: JSON has no tuples
_Part = Annotated[int, Field(ge=0, lt=2**64)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
Sums = Annotated[tuple[_Count, _Part, _Count, _Part], Field(strict=False)]

_TIME_END, _PLACES = 2**62, 2**63
_Time = Annotated[float, Field(ge=0, lt=_TIME_END, allow_inf_nan=False)]
_Place = Annotated[int, Field(ge=0, lt=_PLACES)] | None
_ENVELOPE: dict[str, Any] = {
    "source": str, "seq": Whole, "wall_s": _Time, "mono_s": _Time,
    "rank": NotRequired[_Place], "attempt": NotRequired[_Place], "step": NotRequired[_Place],
}  # fmt: skip


@cache
def _checker(kind: Kind) -> TypeAdapter[Any]:
    types = {key.rstrip("?"): NotRequired[of] if key.endswith("?") else of for key, of in PAYLOADS[kind].items()}
    return TypeAdapter(_strict({**_ENVELOPE, "data": _strict(types)}))


def _strict(types: Mapping[str, Any]) -> Any:
    shape = TypedDict("shape", types)  # type: ignore[misc]
    shape.__pydantic_config__ = ConfigDict(strict=True)  # type: ignore[attr-defined]
    return shape


def read(line: bytes | str) -> Event:
    """The event in a line. Raises ValueError if the line is torn or damaged, or if this version does not know its
    kind."""
    event = Event.from_line(line)
    if is_packed(line):
        _check_packed(event)
    else:
        _checker(event.kind).validate_python(event.__dict__)
    return event


def _check_packed(event: Event) -> None:
    """As the checker of steps does, which takes as long as all the rest. The types come from the format."""
    rank, attempt, step = event.rank or 0, event.attempt or 0, event.step or 0
    if not (0 <= rank < _PLACES and 0 <= attempt < _PLACES and step >= 0):
        raise ValueError("a rank, attempt or step that no job has")
    if not (0 <= event.wall_s < _TIME_END and 0 <= event.mono_s < _TIME_END):
        raise ValueError("no time")


def of_later_version(line: bytes | str) -> tuple[str, int, str] | None:
    """Source, number and kind of a whole event, if this version does not know its kind. None for any other line."""
    try:
        raw = json.loads(line)
        source, number, kind = raw["source"], raw["seq"], raw["kind"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    known = not isinstance(kind, str) or kind in {known_kind.value for known_kind in Kind}
    whole = isinstance(source, str) and isinstance(number, int) and abs(number) < 2**63
    return (source, number, kind) if whole and not known else None


# Finds events that are missing from a journal. Each writer numbers its events 0, 1, 2, ...
#
# A process that is killed may take a number and never write its line, while another of its threads still writes a line.
# So a single missing number near the end of such a file does not count as a gap.

Numbers = npt.NDArray[np.int64]

_LAST = 3  # lines that may come after the number that was never written


class Gaps:
    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = defaultdict(list)
        self._columns: dict[str, list[Numbers]] = defaultdict(list)
        self._whole: set[str] = set()  # sources whose last event was seen

    def note(self, source: str, number: int, kind: str) -> None:
        self._numbers[source].append(number)
        if kind == Kind.AGENT_ENDED.value:
            self._whole.add(source)

    def note_all(self, source: str, numbers: Numbers) -> None:
        """Notes the numbers of many steps at once."""
        self._columns[source].append(numbers)

    def in_words(self) -> list[str]:
        found = ((source, *gap) for source in sorted(self._numbers.keys() | self._columns) for gap in self._of(source))
        return [
            f"event {first} of {source} is missing"
            if first == last
            else f"events {first} to {last} of {source} are missing"
            for source, first, last in found
        ]

    def _of(self, source: str) -> Iterator[tuple[int, int]]:
        numbers = np.unique(np.concatenate([np.array(self._numbers[source], np.int64), *self._columns[source]]))
        before = np.append(-1, numbers[:-1])
        for place in np.flatnonzero(numbers > before + 1).tolist():
            expected, number = int(before[place]) + 1, int(numbers[place])
            cut_short = number == expected + 1 and len(numbers) - place <= _LAST and source not in self._whole
            if not cut_short:
                yield expected, number - 1
