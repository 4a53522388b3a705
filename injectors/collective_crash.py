"""collective.crash: the rank dies inside a collective, when its own part of it has begun."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Crash(Fault):
    """Hands the collective to torch, and dies at once: data may be on its way. `by`: SIGKILL, SIGABRT or SIGSEGV."""

    by: Literal["kill", "abort", "segfault"] = "kill"

    name: ClassVar[str] = "collective.crash"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lethal: ClassVar[bool] = True
    phase: ClassVar[str | None] = "collective"

    def changes(self, site: Any) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead process can't be brought back; restarting it is the job's affair")

    def apply(self, site: Any) -> None:
        die = {"kill": lambda: site.signal(signal.SIGKILL), "abort": os.abort, "segfault": lambda: ctypes.string_at(0)}
        site.call.after = die[self.by]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(
            record, fault, -{"kill": signal.SIGKILL, "abort": signal.SIGABRT, "segfault": signal.SIGSEGV}[self.by]
        )
