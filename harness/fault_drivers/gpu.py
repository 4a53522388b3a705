"""The base class of the `gpu.*` injectors. It writes orders for the NVML overlay into a file. In `nvml.log`, beside
that file, the overlay records which orders changed an answer, and which process got the answer. This is the evidence
that a fault was felt. It comes from a process that asked about the GPU, never from the rank that is hit.

Xids are NVIDIA's GPU error codes. Numbers and mnemonics: NVIDIA's Xid catalogue. Format of a line: kernel_rc.c of
open-gpu-kernel-modules; from driver 595 on, without the process. Actions: `nvmlDeviceGpuRecoveryAction_t`, which field
230 reports; Xid 154 reports that the action has changed. `sampled` False: the text after the number was invented,
because no driver log with this Xid was found."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torchaos.harness.base_classes import Fault
from torchaos.harness.host.gpu_devices import gpu_of, gpus_here, parent_of
from torchaos.harness.host.native_libraries import ENV_CONTROL, ENV_PATH, NVML
from torchaos.harness.interfaces import ChaosError, Emit, Evidence, Handle, Hits, NodeSite, Probe, UsageError, Where
from torchaos.harness.monitoring.probes.process_tree import environ_of
from torchaos.harness.protocol.wire import ENV_NODE, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.file_handles import File


def first_effect(record: Record, fault: str, words: str) -> Evidence | None:
    """Evidence from the first effect event of this fault whose text contains `words`. None if there is none."""
    seen = [e for e in record.of_fault(fault, Kind.EFFECT) if words in str(e.data["effect"]) and e.source == "harness"]
    return Evidence.of(str(seen[0].data["effect"]), seen[0]) if seen else None


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
        """The lines in the kernel log. `pci`: the PCI address without function, such as 0000:3b:00. `process`: pid and
        name."""
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
    """The PCI address of a GPU, without its function. Without a driver, the address of the GPU that the overlay
    simulates."""
    try:
        known = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").iterdir())
        return known[gpu].rpartition(".")[0]
    except (OSError, IndexError):
        return f"0000:{0x10 + gpu:02x}:00"


LOG, KERNEL_LOG = "nvml.log", "kernel.log"
_SERVED = re.compile(
    r"(?P<mono_s>\d+\.\d+) pid (?P<pid>\d+) served (?P<order>gpu\d+\.\S+ = \d+)(?: on node (?P<node>\d+))?"
)


class OverlayFault(Fault):
    """A fault in what NVML reports, shown by the NVML overlay. NVML is the library through which programs query GPUs;
    the overlay changes its answers."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "ranks_or_node"  # a standby has GPUs, too
    needs: ClassVar[frozenset[str]] = frozenset({"nvml_overlay"})
    imitates: ClassVar[str] = "the driver's reports"

    gpu: int | None  # NVML's index; None: the GPU of the target rank

    def orders(self) -> Sequence[str]:
        """The orders, without the name of the GPU, such as `ecc.volatile.uncorrected += 1`."""
        raise NotImplementedError

    def kernel_lines(self, gpu: int) -> Sequence[str]:
        """The lines that the fault adds to `kernel.log`, in the folder of the orders."""
        return ()

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        """The handles of the new files, one in each folder of orders of the target ranks. Undo removes them."""
        handles = []
        for folder, pids in folders_of(site.pids).items():
            made = hashlib.sha256(_text(self, pids).encode()).hexdigest()
            handles.append(File.of(_path(folder, site.fault), folder, site.undo_copies, made=made))
        return handles

    def apply(self, site: NodeSite) -> None:
        for folder, pids in folders_of(site.pids).items():
            _write(_path(folder, site.fault), _text(self, pids).encode())
            if lines := [f"{line}\n" for gpu in gpus_of(self.gpu, pids) for line in self.kernel_lines(gpu)]:
                with open(folder / KERNEL_LOG, "a") as log:
                    log.writelines(lines)

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        probes = []
        for folder, pids in folders_of(site.pids).items():
            gpus = gpus_of(self.gpu, pids)
            keys = {f"gpu{gpu}.{re.split(r' *[+]?= *', order)[0]}" for gpu in gpus for order in self.orders()}
            probes.append(
                AnsweredQueries(folder / LOG, site.fault, frozenset(keys), _since_s(_path(folder, site.fault)))
            )
        return probes

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that a process asked about the GPU after the orders were given, and got an answer that they
        changed."""
        hit = next(record.of_fault(fault, Kind.APPLYING), None)
        served = (event for event in record.of_fault(fault, Kind.EFFECT) if "served_to" in event.data)
        first = next((event for event in served if hit and event.mono_s >= hit.mono_s), None)
        if first is None:
            return None
        words = f"pid {first.data['served_to']}, which watches the GPUs, was shown {first.data['effect']}"
        return Evidence.of(words, first)


def _write(path: Path, orders: bytes) -> None:
    """Writes the file in one step. The file has no name until it is complete (O_TMPFILE of open(2)), so a writer that
    dies leaves nothing. On a file system without O_TMPFILE, a temporary name and a rename are used."""
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC)
    except (OSError, AttributeError):
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(orders)
        partial.chmod(0o644)
        partial.replace(path)
        return
    try:
        os.write(fd, orders)
        os.fchmod(fd, 0o644)
        path.unlink(missing_ok=True)
        os.link(
            f"/proc/self/fd/{fd}", path, src_dir_fd=fd
        )  # src_dir_fd makes Python call linkat(2), which follows the link in /proc
    finally:
        os.close(fd)


@dataclass
class AnsweredQueries:
    """A probe that reads the overlay's log, and reports each process that got an answer changed by one of these
    orders."""

    log: Path
    fault: str
    keys: frozenset[str]
    since_s: float = 0.0  # when the orders were given, CLOCK_MONOTONIC; older lines are about an earlier fault
    period_s: float = 0.05
    _at: int = 0
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def sample(self, emit: Emit) -> None:
        for served in self._lines():
            key = served["order"].partition(" = ")[0]
            told = float(served["mono_s"]) >= self.since_s
            if told and key in self.keys and (served["pid"], served["order"]) not in self._reported:
                self._reported.add((served["pid"], served["order"]))
                effect = {"fault": self.fault, "effect": served["order"], "served_to": int(served["pid"])}
                node = {"node": int(served["node"])} if served["node"] else {}
                gpu = int(key.partition(".")[0].removeprefix("gpu"))
                emit(Kind.EFFECT, {**effect, "served_mono_s": float(served["mono_s"]), "gpu": gpu, **node})

    def _lines(self) -> Iterator[re.Match[str]]:
        try:
            with open(self.log, "rb") as file:
                file.seek(self._at)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if found := _SERVED.fullmatch(line):
                yield found


def folders_of(pids: Sequence[int]) -> dict[Path, list[int]]:
    """The folders of orders with which these ranks were started, each with the pids of its ranks. Each node has its own
    folder. Raises ChaosError if a rank has no such folder."""
    folders: dict[Path, list[int]] = {}
    for pid in pids:
        named = environ_of(pid).get(ENV_CONTROL)
        if not named:
            raise ChaosError(
                f"the job has no folder for orders to the NVML overlay; add to job.env: "
                f'{{TORCHAOS_NVML_PATH: "{{nvml}}", {ENV_CONTROL}: "{{run}}"}}'
            )
        if not Path(named).is_dir():
            raise ChaosError(f"{ENV_CONTROL} of pid {pid} is {named}, which is not a folder; an injector needs one")
        folders.setdefault(Path(named).resolve(), []).append(pid)
    return folders


def gpus_of(gpu: int | None, pids: Sequence[int]) -> list[int]:
    """NVML's indices of the GPUs to hit: `gpu` if that is given, otherwise the GPUs of the target ranks. Raises
    ChaosError if they are not known, or if there is no such GPU."""
    gpus_here.cache_clear()  # the driver shows no UUID before the first program uses the GPU
    return sorted({_gpu_of(gpu, pid, environ_of(pid)) for pid in pids})


def _gpu_of(gpu: int | None, pid: int, env: Mapping[str, str]) -> int:
    here, listed, local = gpus_here(), env.get("CUDA_VISIBLE_DEVICES"), env.get("LOCAL_RANK", "")
    if gpu is None and not local.isdigit():
        raise ChaosError(f"pid {pid} has no LOCAL_RANK, so it is unknown which GPU is meant; write gpu")
    found = gpu_of(env, int(local)) if gpu is None else gpu
    if found is None and listed and listed.startswith("MIG-") and "," not in listed:
        found = parent_of(listed)
    if found is None:
        seen = "the GPUs are of several models" if listed is None else f"CUDA_VISIBLE_DEVICES={listed}"
        raise ChaosError(f"it is not known which GPU local rank {local} uses ({seen}); write gpu, NVML's index")
    if (here and found >= len(here)) or (not here and found >= _simulated(env)):
        many = f"this machine has {len(here)}" if here else f"TORCHAOS_NVML_GPUS makes {_simulated(env)} simulated ones"
        raise ChaosError(f"there is no GPU {found}: {many}")
    return found


def _simulated(env: Mapping[str, str]) -> float:
    """How many GPUs the overlay simulates for the programs that watch the GPUs of this job, as simulate.c counts
    them."""
    folder, named = Path(env.get(ENV_CONTROL, os.devnull)), env.get("TORCHAOS_NVML_GPUS", "1")
    by_order = any(re.search(rb"(?m)^ *gpus *=", path.read_bytes()) for path in folder.glob("*.nvml"))
    return math.inf if by_order or not named.isdigit() else int(named)


def _text(injector: OverlayFault, pids: Sequence[int]) -> str:
    """The orders as text. A line with the node comes before the orders for that node."""
    by_node: dict[str, list[int]] = {}
    for pid in pids:
        by_node.setdefault(environ_of(pid).get(ENV_NODE, ""), []).append(pid)
    lines = []
    for node, own in by_node.items():
        lines += [f"node = {node}"] if node else []
        lines += [f"gpu{gpu}.{order}" for gpu in gpus_of(injector.gpu, own) for order in injector.orders()]
    return "".join(f"{line}\n" for line in lines)


def _since_s(orders: Path) -> float:
    """A time (CLOCK_MONOTONIC) before the orders were given: one second ago or, if earlier, the time of the file (which
    may come from a file server with another clock)."""
    now = time.monotonic()
    with suppress(OSError):  # the orders may be undone already
        return min(now - 1.0, now - (time.time() - orders.stat().st_mtime) - 0.02)
    return now - 1.0


def _path(folder: Path, fault: str) -> Path:
    return folder / (re.sub(r"[^A-Za-z0-9_-]", "_", fault) + ".nvml")


_USAGE = """`python -m torchaos.harness.fault_drivers.gpu [--control PATH] COMMAND...`: runs a command that sees the
NVML overlay.

It is for programs that watch GPUs: a node health agent, nvidia-smi, a device plugin, a DCGM host engine. The job's
ranks don't get the overlay, because NCCL reads its topology from NVML."""


def environment(control: str | None) -> dict[str, str]:
    """The environment of a process that loads the overlay. Raises UsageError if there is no overlay."""
    overlay = os.environ.get(ENV_PATH) or str(NVML.path().parent)
    others = os.environ.get("LD_LIBRARY_PATH")
    paths = {"LD_LIBRARY_PATH": f"{overlay}:{others}" if others else overlay, ENV_PATH: overlay}
    return {**os.environ, **paths, **({ENV_CONTROL: str(Path(control).absolute())} if control else {})}


def main(arguments: list[str]) -> int:
    control = None
    if arguments[:1] == ["--control"] and len(arguments) > 1:
        control, arguments = arguments[1], arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 3
    try:
        os.execvpe(arguments[0], arguments, environment(control))
    except (UsageError, OSError) as error:
        print(f"torchaos: {arguments[0]}: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
