"""Finds events that are missing from a journal. Each writer numbers its events 0, 1, 2, ...

A process that is killed may take a number and never write its line, while another of its threads still writes a line.
So a single missing number near the end of such a file does not count as a gap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchaos.harness.agent.wire import Kind

_LAST = 3  # lines that may come after the number that was never written


class Gaps:
    def __init__(self) -> None:
        self._numbers: dict[str, set[int]] = defaultdict(set)
        self._whole: set[str] = set()  # sources whose last event was seen

    def note(self, source: str, number: int, kind: str) -> None:
        self._numbers[source].add(number)
        if kind == Kind.AGENT_ENDED.value:
            self._whole.add(source)

    def in_words(self) -> list[str]:
        found = ((source, *gap) for source in sorted(self._numbers) for gap in self._of(source))
        return [
            f"event {first} of {source} is missing"
            if first == last
            else f"events {first} to {last} of {source} are missing"
            for source, first, last in found
        ]

    def _of(self, source: str) -> Iterator[tuple[int, int]]:
        numbers, expected = sorted(self._numbers[source]), 0
        for place, number in enumerate(numbers):
            cut_short = number == expected + 1 and len(numbers) - place <= _LAST and source not in self._whole
            if number > expected and not cut_short:
                yield expected, number - 1
            expected = number + 1
