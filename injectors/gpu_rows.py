"""gpu.row_remap_failure: the memory has no spare rows left where one is needed; the GPU has to be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import OverlayFault


@dataclass(frozen=True)
class RowRemapFailure(OverlayFault):
    """`banks` banks of the memory have used all their spare rows, and a row could not be remapped (Xid 64)."""

    banks: int = 1
    gpu: int | None = None

    name = "gpu.row_remap_failure"

    def orders(self) -> Sequence[str]:
        counts = ["remap.uncorrected += 8", "remap.failure = 1", f"remap.histogram.none += {self.banks}"]
        return [*counts, "recovery_action = 1", "xid = 64", "xid = 154"]
