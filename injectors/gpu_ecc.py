"""gpu.ecc_double_bit and gpu.ecc_single_bit_storm: memory errors, as programs that watch the GPU see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin.families.gpu import OverlayFault


@dataclass(frozen=True)
class EccDoubleBit(OverlayFault):
    """NVML reports `count` memory errors that ECC could not correct, and a row of the GPU's memory that is marked for
    remapping."""

    count: int = 1
    gpu: int | None = None

    name = "gpu.ecc_double_bit"

    def orders(self) -> Sequence[str]:
        counts = [f"ecc.{kind}.uncorrected += {self.count}" for kind in ("volatile", "aggregate")]
        return [*counts, "remap.uncorrected += 1", "remap.pending = 1", "recovery_action = 1", "xid = 48", "xid = 154"]


@dataclass(frozen=True)
class EccSingleBitStorm(OverlayFault):
    """NVML reports `count` errors that ECC corrected. They do no harm yet, but worse errors often follow."""

    count: int = 100_000
    gpu: int | None = None

    name = "gpu.ecc_single_bit_storm"

    def orders(self) -> Sequence[str]:
        counts = [f"ecc.{kind}.corrected += {self.count}" for kind in ("volatile", "aggregate")]
        return [*counts, "event.512 = 0"]  # nvmlEventTypeSingleBitEccErrorStorm
