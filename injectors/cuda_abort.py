"""cuda.abort: NCCL's watchdog thread sees the error first and ends the process with SIGABRT and its usual message."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from importlib import import_module

from torchaos.injectors.cuda_errors import Kind, text
from torchaos.plugin import RankSite
from torchaos.plugin.families.ranks import DeathFault


@dataclass(frozen=True)
class Abort(DeathFault):
    """Ends the process as a broken device usually does in real jobs: no exception reaches Python, so no handler and no
    clean-up runs. `kind`: the CUDA error in the message."""

    kind: Kind = "ecc"

    name = "cuda.abort"
    where = ("rank",)
    imitates = "the end of a process whose device is broken"
    needs = frozenset({"agent"})
    code = -signal.SIGABRT
    phase = "backward"

    def apply(self, site: RankSite) -> None:
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
