"""gpu.nvlink_down: links between GPUs are down, after errors on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin.families.gpu import OverlayFault


@dataclass(frozen=True)
class NvlinkDown(OverlayFault):
    """NVML reports that the GPU's first `links` links are inactive and that their error counters rose by `errors`. An
    event with Xid 74 is sent."""

    links: int = 1
    errors: int = 256
    gpu: int | None = None

    name = "gpu.nvlink_down"

    def orders(self) -> Sequence[str]:
        lines = []
        for link in range(self.links):
            counters = ("replay", "recovery", "crc_flit", "receive", "retry")
            lines += [f"nvlink{link}.state = 0", *(f"nvlink{link}.{name} += {self.errors}" for name in counters)]
        return [*lines, "recovery_action = 1", "xid = 74", "xid = 154"]
