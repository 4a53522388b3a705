"""Observer (d): the agent's stamps. It reports that a collective takes longer than its bound, or that no rank begins or
ends a collective."""

from __future__ import annotations

import struct
from pathlib import Path

from torchaos.harness.agent import stamps
from torchaos.harness.watching.observers.opinion import Learned, Opinion

_RING = stamps.SIZE - stamps.SLOTS * 64
_AT_START_S = 10.0
_NUMBER, _BEGUN, _ENDED, _STEP = 0, 4, 6, 7  # words of an entry


class Overdue:
    """Learns how long collectives take, and for how long no collective begins or ends. The first steps do not count."""

    name = "collectives"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, int] = {}  # the newest time in each file, nanoseconds
        self._longest_s = 0.0
        self._quiet = Learned(needed=10)
        self.training = False  # a step was completed

    def look(self, now_s: float, training: bool) -> Opinion:
        """The stronger of two opinions: about the oldest open collective, and about the time in which no collective
        began or ended. `now_s`: CLOCK_MONOTONIC; `training`: what is seen now counts as usual."""
        oldest_s, newest, active = now_s, 0, False
        files = {path: words for path in self._files() if (words := _read(path))}
        for path, words in files.items():
            numbers, begun, ended = words[_NUMBER::8], words[_BEGUN::8], words[_ENDED::8]
            steps = words[_STEP::8]
            self.training = self.training or max(steps) >= 2
            last = max(max(begun), max(ended))
            before = self._seen.get(path, 0)
            if last > before:
                active, self._seen[path] = True, last
                self._learn(begun, ended, steps, before)
            newest = max(newest, last)
            open_ = [
                start
                for number, start, end in zip(numbers, begun, ended, strict=True)
                if number > 0 and start and not end
            ]
            oldest_s = min([oldest_s, *(start / 1e9 for start in open_)])
        self._seen = {path: last for path, last in self._seen.items() if path in files}
        if active:
            self._quiet.happened(now_s, self.training and training)
        age = Opinion(self.name, now_s - oldest_s, self._usual_s, True, "a collective is open all this time")
        quiet = self._quiet.opinion(self.name, now_s, "no collective began or ended")
        return max(age, quiet, key=lambda opinion: opinion.quiet_s / max(1.0, opinion.usual_s))

    @property
    def _usual_s(self) -> float:
        """How long collectives take. At the start, others may wait in one for a rank that prepares something."""
        return max(self._longest_s, 0.0 if self._quiet.events >= self._quiet.needed else _AT_START_S)

    def _learn(self, begun: tuple[int, ...], ended: tuple[int, ...], steps: tuple[int, ...], since: int) -> None:
        took = [end - start for start, end, step in zip(begun, ended, steps, strict=True) if end > since and step >= 2]
        self._longest_s = max([self._longest_s, *(nanoseconds / 1e9 for nanoseconds in took)])

    def _files(self) -> list[Path]:
        """The stamps of the latest attempt."""
        found = sorted(self._folder.glob("*.stamps"))
        attempts = {path: path.name.split("-")[1] for path in found if path.name.count("-") == 2}
        last = max(attempts.values(), key=lambda text: int(text[1:]) if text[1:].isdigit() else 0, default="")
        return [path for path, attempt in attempts.items() if attempt == last]


def _read(path: Path) -> tuple[int, ...] | None:
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) != stamps.SIZE:
        return None
    return struct.unpack_from(f"{stamps.SLOTS * 8}q", raw, _RING)
