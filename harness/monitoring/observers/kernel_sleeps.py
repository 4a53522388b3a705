"""The kernel as an observer of hangs: its tracepoints show (by bpftrace) that a rank sleeps without a break where no
signal ends it, as with a dead disk. In /proc, many short reads look the same.

It is asked only while another observer suspects a hang, because it takes bpftrace a second to attach."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.interfaces import ChaosError, RankProcess
from torchaos.harness.monitoring.diagnosis import kernel_trace
from torchaos.harness.monitoring.diagnosis.kernel_trace import Wait
from torchaos.harness.monitoring.observers.hang_detectors import Opinion

_LOOK_S = 1.0
_LONG_S = 0.8 * _LOOK_S  # shorter sleeps may be reads of a slow disk


@dataclass
class KernelSleeps:
    """Looks for ranks that sleep in the kernel. Has no opinion without root or bpftrace, or if no rank sleeps long.
    `watch`: how the ranks (pid by rank) are observed for some seconds."""

    name = "kernel"
    watch: Callable[[Mapping[int, int], float], Sequence[Wait]] = kernel_trace.watch
    missing: Callable[[], str | None] = kernel_trace.missing
    problem: str = ""
    _asleep: tuple[Wait, ...] = ()
    _looking: threading.Thread | None = field(default=None, repr=False)

    def look(self, wanted: bool, ranks: Sequence[RankProcess]) -> Opinion | None:
        """How long a rank sleeps, at least. `wanted`: another observer suspects a hang."""
        if not wanted:
            self._asleep, self.problem = (), ""
            return None
        if self.problem:
            return Opinion(self.name, 0.0, 0.0, armed=False, blind=self.problem)
        if not (self._looking and self._looking.is_alive()) and not self.missing():
            pids = {rank.rank: rank.pid for rank in ranks}
            self._looking = threading.Thread(target=self._ask, args=(pids,), name="kernel")  # some seconds
            self._looking.start()
        if not self._asleep:
            return None
        longest_s = max(wait.longest_s for wait in self._asleep)
        asleep = tuple(wait.rank for wait in self._asleep)
        return Opinion(self.name, longest_s, 0.0, detail="; ".join(map(str, self._asleep)), ranks=asleep)

    def words(self) -> dict[int, str]:
        """What the last look saw, as a clause by rank."""
        return {wait.rank: f"the kernel saw it {wait.what} for {wait.longest_s:.2f} s" for wait in self._asleep}

    def _ask(self, pids: Mapping[int, int]) -> None:
        try:
            seen = self.watch(pids, _LOOK_S)
        except (OSError, ChaosError) as error:
            self.problem = str(error)
            return
        self._asleep = tuple(wait for wait in seen if wait.longest_s >= _LONG_S)
