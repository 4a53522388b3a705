"""cuda.out_of_memory: the device has no memory left. Without a device, the process has no memory left."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record, died

_MORE = 64 << 20  # bytes: more than an allocator keeps in reserve under the limit


@dataclass(frozen=True)
class OutOfMemory(Fault):
    """Raises the allocator's own error. On a GPU it uses torch's memory limit of this process
    (set_per_process_memory_fraction), otherwise RLIMIT_AS, and leaves `spare` bytes free. The limit stays until the
    process ends."""

    spare: int = 1 << 20

    name = "cuda.out_of_memory"
    where = ("rank",)
    needs = frozenset({"agent"})
    phase = "forward"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("the limit is the process's own, and goes with it")

    def apply(self, site: RankSite) -> None:
        torch: Any = import_module("torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            reserved = torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + self.spare) / total))
            want = total  # no reserved block has this size
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.spare
            _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
            want = self.spare + _MORE
        torch.empty(want, dtype=torch.uint8, device=device)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, *range(1, 256), -6)
