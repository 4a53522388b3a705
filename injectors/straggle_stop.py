"""straggle.stop: a slow rank, by SIGSTOP and SIGCONT in turns, for any rank and without privileges."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Emit, Evidence, Fault, Handle, NodeSite, Probe, Record, Seconds, TargetGone
from torchaos.plugin.evidence import took_turns
from torchaos.plugin.undo import Process


@dataclass(frozen=True)
class StraggleStop(Fault):
    """The rank runs for 1/`factor` of each `period` (seconds). Measured: with a factor of 3 it is about 2.5 times as
    slow."""

    factor: float = 3.0
    period: Seconds = 0.02

    name = "straggle.stop"
    where = ("node",)
    needs = frozenset({"pidfd"})

    def __post_init__(self) -> None:
        if self.factor <= 1 or self.period <= 0:
            raise ValueError("factor is more than 1, and period more than 0")

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [Process.of(pid, "resume") for pid in site.pids]

    def apply(self, site: NodeSite) -> None:
        """Does nothing. The probe sends the signals; it stops before the fault is undone, or when the harness ends."""

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return (_Turns(site, self.period / self.factor, self.period * (1 - 1 / self.factor)),)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return took_turns(record, fault)


class _Turns:
    def __init__(self, site: NodeSite, on_s: float, off_s: float) -> None:
        self._site, self.period_s, self._off_s = site, on_s, off_s

    def sample(self, emit: Emit) -> None:
        try:
            self._site.signal(signal.SIGSTOP)
            time.sleep(self._off_s)
        except TargetGone:
            return
        finally:
            try:
                self._site.signal(signal.SIGCONT)
            except TargetGone:
                pass
