"""Observer (b): the stacks of all ranks do not change. It takes stacks only while another observer suspects a hang,
since that costs about 20 ms of CPU per rank each time.

A rank may work in a single call for a long time. So while any rank uses the CPU, the time counts only a tenth."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.contracts import RankProcess
from torchaos.harness.watching.diagnosis.stacks import Stack, find_py_spy, sample
from torchaos.harness.watching.observers.opinion import Opinion

_EVERY_S = 0.2
_BUSY = 10.0


class Stagnation:
    name = "stacks"

    def __init__(self) -> None:
        self._py_spy = find_py_spy()
        self.stacks: dict[int, Stack] = {}  # by pid, as last seen
        self._since_s: float | None = None
        self._looked_s = 0.0

    def look(self, now_s: float, wanted: bool, working: bool, ranks: Sequence[RankProcess]) -> Opinion:
        """How long no stack has changed. `wanted`: another observer suspects a hang. `working`: a rank uses the CPU or
        the disk."""
        if not wanted or not self._py_spy:
            self._since_s = None
            return Opinion(self.name, 0.0, 0.0, armed=False)
        if now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            found = sample([rank.pid for rank in ranks], self._py_spy)
            if found != self.stacks or not found:
                self.stacks, self._since_s = found, now_s
            elif self._since_s is None:
                self._since_s = now_s
        quiet = 0.0 if self._since_s is None else now_s - self._since_s
        # The other observers suspect a hang when the job has been quiet for half a second. This observer starts only
        # then.
        quiet = quiet / _BUSY if working else (quiet + 0.5 if quiet >= 2 * _EVERY_S else 0.0)
        return Opinion(self.name, quiet, 0.0, armed=True)
