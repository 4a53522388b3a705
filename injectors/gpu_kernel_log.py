"""gpu.kernel_log: an Xid in the kernel's own log. It can cordon or reboot a real node, whoever reads it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Where
    from torchaos.harness.record.record import Record

DEVICE = "/dev/kmsg"


@dataclass(frozen=True)
class KernelLog(Fault):
    """Writes the lines of Xid `number` to /dev/kmsg. A line from user space never has the kernel's own facility, so
    that journald cuts one prefix off; with `journald` there are two."""

    number: int = 79
    gpu: int = 0
    journald: bool = False

    name: ClassVar[str] = "gpu.kernel_log"
    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"root"})
    consent: ClassVar[str] = "kmsg"

    def changes(self, site: Any) -> Irreversible:
        from torchaos.harness.contracts import Irreversible, UsageError
        from torchaos.harness.mechanics.gpu.xids import XIDS

        if self.number not in XIDS:
            raise UsageError(f"Xid {self.number} is none of those that are known: {', '.join(map(str, XIDS))}")
        return Irreversible("what was written to the kernel's log stays there")

    def apply(self, site: Any) -> None:
        from torchaos.harness.mechanics.gpu.xids import XIDS, pci_of

        prefix = "NVRM: " if self.journald else ""
        with open(DEVICE, "w") as log:
            for line in XIDS[self.number].kernel_lines(pci_of(self.gpu)):
                log.write(f"<2>{prefix}{line}\n")
                log.flush()  # one record for each write
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": f"Xid {self.number} written to {DEVICE}"})

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.mechanics.gpu.effects import told

        return told(record, fault, "written to")
