"""process.segfault: the rank reads address 0, as a broken extension or driver does."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Site, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Segfault(Fault):
    """A real invalid read; the kernel ends the process by SIGSEGV."""

    name: ClassVar[str] = "process.segfault"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lethal: ClassVar[bool] = True

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead process can't be brought back; restarting it is the job's affair")

    def apply(self, site: Site) -> None:
        ctypes.string_at(0)

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]]:
        return [(0.0, signal.SIGSEGV)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, -signal.SIGSEGV)
