"""Xids, NVIDIA's GPU error codes: the driver's log lines, what NVML shows with them, and the recovery action.

Numbers and mnemonics: NVIDIA's Xid catalogue. Format of a line: kernel_rc.c of open-gpu-kernel-modules; from driver 595
on, without the process. Actions: `nvmlDeviceGpuRecoveryAction_t`, which field 230 reports; Xid 154 reports a change of
it. `sampled` False: the text after the number was made up, because no log of the driver with this Xid was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NONE, RESET, REBOOT, DRAIN_P2P, DRAIN_AND_RESET = range(5)
_ACTION = {RESET: "GPU Reset Required", REBOOT: "Node Reboot Required", DRAIN_P2P: "Drain P2P"}
ACTION_CHANGED = 154


@dataclass(frozen=True)
class Xid:
    number: int
    mnemonic: str
    text: str
    orders: tuple[str, ...] = ()  # orders for other values that NVML shows
    action: int = NONE
    sampled: bool = True

    def all_orders(self) -> list[str]:
        """The lines to send to the NVML overlay, the library that changes what NVML reports. Events come last, because
        a program reads the other values as soon as it gets an event."""
        changed = [f"recovery_action = {self.action}"] if self.action else []
        events = [f"xid = {number}" for number in (self.number, *([ACTION_CHANGED] if self.action else []))]
        return [*self.orders, *changed, *events]

    def kernel_lines(self, pci: str, process: tuple[int, str] | None = None) -> list[str]:
        """The lines of the kernel log. `pci`: address without function, such as 0000:3b:00. `process`: pid, name."""
        who = f"pid={process[0]}, name={process[1]}, " if process else ""
        lines = [f"NVRM: Xid (PCI:{pci}): {self.number}, {who}{self.text}"]
        if self.number == 79:
            lines.append(f"NVRM: GPU {pci}.0: GPU has fallen off the bus.")
        if self.action:
            to = f"0x{self.action:x} ({_ACTION[self.action]})"
            lines.append(
                f"NVRM: Xid (PCI:{pci}): {ACTION_CHANGED}, {who}GPU recovery action changed from 0x0 (None) to {to}"
            )
        return lines


_DOUBLE_BIT = ("ecc.volatile.uncorrected += 1", "ecc.aggregate.uncorrected += 1")
_LINK = ("nvlink0.replay += 64", "nvlink0.recovery += 3", "nvlink0.crc_flit += 128")
_GSP = (
    "Timeout after 6s of waiting for RPC response from GPU0 GSP! "
    "Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x4)."
)


def _nvlink5(number: int, unit: str, fatal: bool) -> Xid:
    severity = "Fatal" if fatal else "Nonfatal"
    text = f"{unit} {severity} XC0 i0 Link 00 (0x00000001 0x00000002 0x00000000 0x00000000 0x00000000 0x00000000)"
    return Xid(number, f"NVLINK_{unit}_ERROR", text, _LINK, RESET if fatal else NONE, unit == "RLW_RXPIPE")


XIDS = {
    xid.number: xid
    for xid in (
        Xid(48, "ROBUST_CHANNEL_GPU_ECC_DBE", "DBE (double bit error) ECC error", _DOUBLE_BIT, RESET, sampled=False),
        Xid(
            63, "INFOROM_DRAM_RETIREMENT_EVENT",
            "Row Remapper: New row marked for remapping, reset gpu to activate.",
            ("remap.uncorrected += 1", "remap.pending = 1"),
        ),
        Xid(
            64, "INFOROM_DRAM_RETIREMENT_FAILURE", "Row Remapper: Failed to remap a row.", ("remap.failure = 1",),
            RESET, sampled=False,
        ),
        Xid(
            74, "NVLINK_ERROR", "NVLink: fatal error detected on link 0", ("nvlink0.state = 0", *_LINK), RESET,
            sampled=False,
        ),
        Xid(79, "GPU_HAS_FALLEN_OFF_THE_BUS", "GPU has fallen off the bus.", ("lost = 1",), REBOOT),
        Xid(94, "CONTAINED_ERROR", "Contained: CE User Channel (0x9). RST: No, D-RST: No", _DOUBLE_BIT),
        Xid(95, "UNCONTAINED_ERROR", "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", _DOUBLE_BIT, RESET),
        Xid(119, "GSP_RPC_TIMEOUT", _GSP, ("error.nvmlDeviceGetClockInfo = 999",), RESET),
        Xid(120, "GSP_ERROR", "GSP task exception", ("error.nvmlDeviceGetClockInfo = 999",), RESET, sampled=False),
        Xid(121, "C2C_ERROR", "C2C link error", sampled=False),
        Xid(140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "Unrecoverable ECC error", _DOUBLE_BIT, RESET, sampled=False),
        Xid(143, "GPU_INIT_ERROR", "GPU initialisation error", (), RESET, sampled=False),
        _nvlink5(144, "SAW_MVB", True), _nvlink5(145, "RLW_RXPIPE", False), _nvlink5(146, "TLW_RX", True),
        _nvlink5(147, "TREX", True), _nvlink5(148, "NVLPW_CTRL", False), _nvlink5(149, "NETIR", True),
        _nvlink5(150, "MSE", True),
    )
}  # fmt: skip


def pci_of(gpu: int) -> str:
    """The PCI address of a GPU without its function, from the driver. Without a driver, the simulated address of the
    overlay."""
    try:
        known = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").iterdir())
        return known[gpu].rpartition(".")[0]
    except (OSError, IndexError):
        return f"0000:{0x10 + gpu:02x}:00"
