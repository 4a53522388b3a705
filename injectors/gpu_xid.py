"""gpu.xid: the driver reports an Xid, with its usual signs: counts, the recovery action, Xid 154."""

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
