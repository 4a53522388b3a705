"""gpu.ecc_double_bit and gpu.ecc_single_bit_storm: memory errors, as whoever watches the GPU sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import OverlayFault


@dataclass(frozen=True)
class EccDoubleBit(OverlayFault):
    """`count` errors that ECC could not correct, in the GPU's memory; a row is marked to be remapped."""

    count: int = 1
    gpu: int | None = None

    name = "gpu.ecc_double_bit"

    def orders(self) -> Sequence[str]:
        counts = [f"ecc.{kind}.uncorrected += {self.count}" for kind in ("volatile", "aggregate")]
        return [*counts, "remap.uncorrected += 1", "remap.pending = 1", "recovery_action = 1", "xid = 48", "xid = 154"]


@dataclass(frozen=True)
class EccSingleBitStorm(OverlayFault):
    """`count` errors that ECC did correct: no harm yet, and usually the announcement of it."""

    count: int = 100_000
    gpu: int | None = None

    name = "gpu.ecc_single_bit_storm"

    def orders(self) -> Sequence[str]:
        counts = [f"ecc.{kind}.corrected += {self.count}" for kind in ("volatile", "aggregate")]
        return [*counts, "event.512 = 0"]  # nvmlEventTypeSingleBitEccErrorStorm
