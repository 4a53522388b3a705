"""gpu.thermal_slowdown: the GPU is too hot, and its clocks say why they are low. A signal only: no kernel gets
slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import OverlayFault

_REASONS = {"software": 0x20, "hardware": 0x40 | 0x8, "power_brake": 0x80 | 0x8}  # nvmlClocksEventReason*


@dataclass(frozen=True)
class ThermalSlowdown(OverlayFault):
    """Clocks are held down, for a `reason`: by the driver, by the GPU itself, or by the power supply. `celsius` is its
    temperature."""

    reason: Literal["software", "hardware", "power_brake"] = "hardware"
    celsius: int = 92
    gpu: int | None = None

    name = "gpu.thermal_slowdown"

    def orders(self) -> Sequence[str]:
        return [f"clocks_event_reasons = {_REASONS[self.reason]}", f"temperature = {self.celsius}"]
