"""gpu.kernel_log: an Xid in the kernel's own log. On a real node, programs that read the log may then cordon or reboot
the node."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.mechanics.gpu.effects import first_effect
from torchaos.harness.mechanics.gpu.xids import XIDS, pci_of
from torchaos.plugin import Evidence, Fault, Irreversible, Kind, NodeSite, Record, UsageError

DEVICE = "/dev/kmsg"


@dataclass(frozen=True)
class KernelLog(Fault):
    """Writes the lines of Xid `number` to /dev/kmsg. journald removes a prefix from lines that do not come from the
    kernel; with `journald` the prefix is written twice, so that journald shows it once."""

    number: int = 79
    gpu: int = 0
    journald: bool = False

    name = "gpu.kernel_log"
    where = ("node",)
    needs = frozenset({"root"})
    consent = "kmsg"

    def changes(self, site: NodeSite) -> Irreversible:
        if self.number not in XIDS:
            raise UsageError(f"Xid {self.number} is not known; known are {', '.join(map(str, XIDS))}")
        return Irreversible("lines in the kernel's log can't be removed")

    def apply(self, site: NodeSite) -> None:
        prefix = "NVRM: " if self.journald else ""
        with open(DEVICE, "w") as log:
            for line in XIDS[self.number].kernel_lines(pci_of(self.gpu)):
                log.write(f"<2>{prefix}{line}\n")
                log.flush()  # one record for each write
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": f"Xid {self.number} written to {DEVICE}"})

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return first_effect(record, fault, "written to")
