"""gpu.kernel_log: an Xid in the kernel's own log. On a real node, programs that read the log may then cordon or reboot
the node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchaos.plugin import Emit, Evidence, Fault, Irreversible, Kind, NodeSite, Probe, Record, UsageError
from torchaos.plugin.families.gpu import XIDS, first_effect, pci_of

DEVICE = "/dev/kmsg"


@dataclass(frozen=True)
class KernelLog(Fault):
    """Writes the lines of Xid `number` to /dev/kmsg. From lines that do not come from the kernel, journald removes the
    prefix `NVRM: `. With `journald`, the prefix is written twice, so that journald shows it once."""

    number: int = 79
    gpu: int = 0
    journald: bool = False

    name = "gpu.kernel_log"
    where = ("node",)
    needs = frozenset({"root"})
    imitates = "the driver's lines in the kernel's log"
    consent = "kmsg"

    def changes(self, site: NodeSite) -> Irreversible:
        if self.number not in XIDS:
            raise UsageError(f"Xid {self.number} is not known; known are {', '.join(map(str, XIDS))}")
        vars(self)["_before"] = max((number for number, _ in _records()), default=-1)  # no field: not a parameter
        return Irreversible("lines in the kernel's log can't be removed")

    def apply(self, site: NodeSite) -> None:
        prefix = "NVRM: " if self.journald else ""
        with open(DEVICE, "w") as log:
            for line in XIDS[self.number].kernel_lines(pci_of(self.gpu)):
                log.write(f"<2>{prefix}{line}\n")
                log.flush()  # one record for each write

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [Shown(site.fault, f"NVRM: Xid (PCI:{pci_of(self.gpu)}): {self.number},", vars(self)["_before"])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that the kernel shows the line to the programs that read its log."""
        return first_effect(record, fault, "the kernel's log shows")


@dataclass
class Shown:
    """A probe that reads the kernel's log as any watcher does, and reports the first record after number `after` that
    contains the text."""

    fault: str
    text: str
    after: int
    period_s: float = 0.2
    _told: bool = field(default=False)

    def sample(self, emit: Emit) -> None:
        found = next((number for number, text in _records() if number > self.after and self.text in text), None)
        if found is not None and not self._told:
            self._told = True
            effect = f"the kernel's log shows, as record {found}, `{self.text}`"
            emit(Kind.EFFECT, {"fault": self.fault, "effect": effect})


def _records() -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each record of the kernel's log (Documentation/ABI/testing/dev-kmsg)."""
    try:
        log = os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                part = os.read(log, 1 << 14)
            except BrokenPipeError:
                continue  # the kernel has overwritten this record
            except BlockingIOError:
                return
            if not part:
                return
            for line in part.decode(errors="replace").splitlines():
                head, semicolon, text = line.partition(";")
                number = head.split(",")[1:2]
                if semicolon and number and number[0].isdigit():
                    yield int(number[0]), text
    finally:
        os.close(log)
