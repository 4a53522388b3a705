"""Observer (b): the stacks of all ranks do not change. It takes stacks only while another observer suspects a hang,
since that costs about 20 ms of CPU per rank each time.

A rank may work in a single call for a long time. So while any rank uses the CPU, the time counts only a tenth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchaos.harness.contracts import RankProcess
from torchaos.harness.watching.diagnosis.stacks import Stack, find_py_spy, sample
from torchaos.harness.watching.observers.opinion import Opinion

_EVERY_S = 0.2
_BUSY = 10.0


@dataclass
class _Seen:
    """A stack that was the same in all looks from `since_s` to `until_s`, CLOCK_MONOTONIC."""

    stack: Stack
    since_s: float
    until_s: float


class Stagnation:
    """Blind without py-spy, and until it has read the stacks of all ranks."""

    name = "stacks"

    def __init__(self, py_spy: Callable[[], str | None] = find_py_spy) -> None:
        self._py_spy = py_spy()
        self._seen: dict[int, _Seen] = {}  # by pid
        self._looked_s = 0.0

    def look(self, now_s: float, wanted: bool, working: bool, ranks: Sequence[RankProcess]) -> Opinion:
        """How long no stack has changed. `wanted`: another observer suspects a hang. `working`: a rank uses the CPU or
        the disk."""
        if not self._py_spy:
            return Opinion(self.name, 0.0, 0.0, armed=False, blind="py-spy is not installed")
        if not wanted:
            self._seen.clear()
            return Opinion(self.name, 0.0, 0.0, armed=False)
        if now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            self._sample([rank.pid for rank in ranks], self._py_spy)
        if unread := sorted(rank.rank for rank in ranks if rank.pid not in self._seen):
            return Opinion(self.name, 0.0, 0.0, armed=False, blind=f"py-spy can't read the stacks of ranks {unread}")
        quiet = min(seen.until_s - seen.since_s for seen in self._seen.values())
        # The other observers suspect a hang when the job has been quiet for half a second. This observer starts only
        # then.
        quiet = quiet / _BUSY if working else (quiet + 0.5 if quiet >= 2 * _EVERY_S else 0.0)
        detail = "; ".join(f"rank {rank.rank} at {self._seen[rank.pid].stack.place}" for rank in ranks)
        return Opinion(self.name, quiet, 0.0, armed=True, detail=detail)

    def _sample(self, pids: Sequence[int], py_spy: str) -> None:
        """Reads all stacks. On a busy machine that takes long, and may fail for some: then these count as unchanged
        only until they were last read."""
        begun_s = time.monotonic()
        found = sample(pids, py_spy)
        for pid, stack in found.items():
            seen = self._seen.get(pid)
            if seen is None or seen.stack != stack:
                self._seen[pid] = _Seen(stack, time.monotonic(), begun_s)
            else:
                seen.until_s = begun_s
