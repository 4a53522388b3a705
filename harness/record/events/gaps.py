"""Finds events that are missing from a journal. Each writer numbers its events 0, 1, 2, ...

A process that is killed may take a number and never write its line, while another of its threads still writes a line.
So a single missing number near the end of such a file does not count as a gap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchaos.harness.agent.wire import Kind

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
