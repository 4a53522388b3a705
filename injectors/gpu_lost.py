"""gpu.lost: the GPU has fallen off the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin.families.gpu import OverlayFault


@dataclass(frozen=True)
class Lost(OverlayFault):
    """Every NVML call about the GPU returns NVML_ERROR_GPU_IS_LOST, also a call with a handle from before. An event
    with Xid 79 is sent."""

    gpu: int | None = None

    name = "gpu.lost"

    def orders(self) -> Sequence[str]:
        return ["lost = 1", "recovery_action = 2", "xid = 79", "xid = 154"]
