"""cuda.abort: NCCL's watchdog thread sees the error first and ends the process, with SIGABRT and its own words."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.cuda import Kind, text
from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Abort(Fault):
    """No exception reaches Python: no handler, no clean-up. What a broken device mostly looks like in a real job.
    `kind`: which of CUDA's errors its words name."""

    kind: Kind = "ecc"

    name: ClassVar[str] = "cuda.abort"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lethal: ClassVar[bool] = True
    phase: ClassVar[str | None] = "backward"

    def changes(self, site: Any) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead process can't be brought back; restarting it is the job's affair")

    def apply(self, site: Any) -> None:
        rank = os.environ.get("RANK", "0")
        why = (
            f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: "
            f"{text(import_module('torch'), self.kind)}"
        )

        def watchdog() -> None:
            os.write(2, f"[rank{rank}]: {why}\n".encode())
            os.write(
                2,
                f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {why}\n".encode(),
            )
            os.abort()

        threading.Thread(target=watchdog, name="watchdog").start()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, -signal.SIGABRT)
