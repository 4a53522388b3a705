"""The device of a rank is broken, or has no memory left.

- cuda.error: every call that touches a device raises the same error, until exit
- cuda.abort: NCCL's watchdog thread sees the error first and ends the process with SIGABRT and its usual message
- cuda.out_of_memory: the device has no memory left. Without a device, the process has no memory left"""

from __future__ import annotations

import os
import resource
import signal
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torchaos.injectors.cuda_errors import Kind, error, poison, text
from torchaos.plugin import Irreversible, NodeSite, RankSite
from torchaos.plugin.families.ranks import DeathFault, ExceptionFault


@dataclass(frozen=True)
class Error(ExceptionFault):
    """Raises PyTorch's own error, with its text and code, in the call at the moment of the trigger. Every later call
    raises it again, even if the job catches it. Without a GPU, operations on the CPU raise it. `kind`: the CUDA
    error."""

    kind: Kind = "ecc"

    name = "cuda.error"
    imitates = "PyTorch's error of a broken CUDA context"
    phase = "backward"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a broken context stays broken until the process ends")

    def apply(self, site: RankSite) -> None:
        torch: Any = import_module("torch")
        poison(torch, self.kind)
        raise error(torch, self.kind)


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


_MORE = 64 << 20  # bytes: more than the free memory that an allocator holds


@dataclass(frozen=True)
class OutOfMemory(ExceptionFault):
    """Limits the memory so that only `spare` bytes are free, and asks for more, so that the allocator raises its own
    error. The limit is torch's memory limit of this process on a GPU (set_per_process_memory_fraction), otherwise
    RLIMIT_AS. It stays until the process ends."""

    spare: int = 1 << 20

    name = "cuda.out_of_memory"
    phase = "forward"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("the limit is one of the process, and ends with the process")

    def apply(self, site: RankSite) -> None:
        torch: Any = import_module("torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            reserved = torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + self.spare) / total))
            want = total  # larger than any free block that the allocator holds
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.spare
            _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
            want = self.spare + _MORE
        torch.empty(want, dtype=torch.uint8, device=device)
