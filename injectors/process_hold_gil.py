"""process.hold_gil: no Python thread of the rank runs for a time, as when a C extension never yields."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.quantities import Seconds

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Site, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class HoldGil(Fault):
    """Sleeps in C for `time` without giving up the interpreter lock: heartbeats and watchdog threads in Python stop
    too."""

    time: Seconds = 5.0

    name: ClassVar[str] = "process.hold_gil"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible(f"the lock is given back by itself after {self.time} s")

    def apply(self, site: Site) -> None:
        ctypes.PyDLL(None).usleep(int(self.time * 1e6))  # PyDLL, unlike CDLL, keeps the lock

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import stood_still

        return stood_still(record, fault, self.time)
