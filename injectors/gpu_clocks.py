"""gpu.thermal_slowdown: NVML reports that the GPU is too hot and its clocks are low. Only the report changes: no kernel
gets slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin.families.gpu import OverlayFault

_REASONS = {"software": 0x20, "hardware": 0x40 | 0x8, "power_brake": 0x80 | 0x8}  # nvmlClocksEventReason*


@dataclass(frozen=True)
class ThermalSlowdown(OverlayFault):
    """NVML reports low clocks and the temperature `celsius`. `reason`: what lowered the clocks: the driver, the GPU
    itself, or the power supply."""

    reason: Literal["software", "hardware", "power_brake"] = "hardware"
    celsius: int = 92
    gpu: int | None = None

    name = "gpu.thermal_slowdown"

    def orders(self) -> Sequence[str]:
        return [f"clocks_event_reasons = {_REASONS[self.reason]}", f"temperature = {self.celsius}"]
