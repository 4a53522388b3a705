"""gpu.row_remap_failure: the GPU's memory has no spare row left to replace a broken row, so the GPU must be
replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin.families.gpu import OverlayFault


@dataclass(frozen=True)
class RowRemapFailure(OverlayFault):
    """NVML reports that `banks` memory banks have used all spare rows, and that a row could not be remapped. An event
    with Xid 64 is sent."""

    banks: int = 1
    gpu: int | None = None

    name = "gpu.row_remap_failure"

    def orders(self) -> Sequence[str]:
        counts = ["remap.uncorrected += 8", "remap.failure = 1", f"remap.histogram.none += {self.banks}"]
        return [*counts, "recovery_action = 1", "xid = 64", "xid = 154"]
