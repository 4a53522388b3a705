"""cuda.out_of_memory: the device has no memory left. Without a device, the process has no memory left."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torchaos.plugin import Irreversible, NodeSite, RankSite
from torchaos.plugin.families.ranks import ExceptionFault

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
