"""What NVML reports of a GPU. Only the report changes: no kernel gets slower, and no memory is damaged.

- gpu.xid: the driver reports an Xid, with its usual signs: counts, the recovery action, Xid 154
- gpu.ecc_double_bit, gpu.ecc_single_bit_storm: memory errors, as programs that watch the GPU see them
- gpu.row_remap_failure: there is no spare row left to replace a broken row, so the GPU must be replaced
- gpu.nvlink_down: links between GPUs are down, after errors on them
- gpu.lost: the GPU has fallen off the bus
- gpu.thermal_slowdown: the GPU is too hot, and its clocks are low"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin.families.gpu import XIDS, OverlayFault, pci_of

Number = Literal[48, 63, 64, 74, 79, 94, 95, 119, 120, 121, 140, 143, 144, 145, 146, 147, 148, 149, 150]


@dataclass(frozen=True)
class Xid(OverlayFault):
    """Sends Xid `number` as an event to all programs that wait for NVML events. With `kernel_log`, the kernel's lines
    for this Xid are written to the file `kernel.log` beside the orders of the NVML overlay."""

    number: Number
    gpu: int | None = None
    kernel_log: bool = False

    name = "gpu.xid"

    def orders(self) -> Sequence[str]:
        return XIDS[self.number].all_orders()

    def kernel_lines(self, gpu: int) -> Sequence[str]:
        return XIDS[self.number].kernel_lines(pci_of(gpu)) if self.kernel_log else ()


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


@dataclass(frozen=True)
class Lost(OverlayFault):
    """Every NVML call about the GPU returns NVML_ERROR_GPU_IS_LOST, also a call with a handle from before. An event
    with Xid 79 is sent."""

    gpu: int | None = None

    name = "gpu.lost"

    def orders(self) -> Sequence[str]:
        return ["lost = 1", "recovery_action = 2", "xid = 79", "xid = 154"]


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
