"""The capabilities of a machine that injectors and launchers may need. Each capability has a name, a check, and advice
for the case that it is missing. Capabilities that only a launcher's own nodes need are in the launcher, see
`Launcher.checks`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.interfaces import Capability, UsageError
from torchaos.harness.record.environment import installed, resolve_program


@dataclass(frozen=True)
class Finding:
    name: str
    present: bool
    detail: str
    remedy: str  # what to do if it is missing


def check(name: str) -> Finding:
    """Checks a capability of this machine. Raises KeyError for an unknown name, which is a mistake in a plug-in."""
    wanted = CHECKS.get(name) or known()[name]
    found = wanted.find()
    detail = wanted.used_for if found is None else f"{wanted.used_for}; {found}"
    return Finding(name, found is not None, detail, wanted.remedy)


def known() -> dict[str, Capability]:
    """All capabilities, also those that the launchers bring. Launchers that can't be loaded are left out."""
    for name in registry.names("launchers"):
        with suppress(UsageError):
            for capability, found in registry.find("launchers", name).checks.items():
                CHECKS.setdefault(capability, found)
    return CHECKS


def _pidfd() -> str | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return None
    return f"Linux {os.uname().release}"


def _agent() -> str | None:
    return f"Python {sys.version_info.major}.{sys.version_info.minor}" if sys.platform == "linux" else None


def _torchrun() -> str | None:
    try:
        return resolve_program("torchrun", Path.cwd())
    except Exception:
        return None


def _torch() -> str | None:
    return f"torch {version}" if (version := installed(sys.executable).get("torch")) else None


def _root() -> str | None:
    return "root" if os.geteuid() == 0 else None


def _mount() -> str | None:
    from torchaos.harness.fault_drivers.storage_faults import may_mount

    return "tmpfs" if may_mount() else None


def _own_processes() -> str | None:
    return "/proc" if Path(f"/proc/{os.getpid()}/environ").exists() else None


def _program(*names: str) -> Callable[[], str | None]:
    def find() -> str | None:
        found = [shutil.which(name) for name in names]
        return ", ".join(path for path in found if path) if all(found) else None

    return find


def _links() -> str | None:
    """How network namespaces can be created: as root, or in a new user namespace. None if they can't."""
    as_root = os.geteuid() == 0
    command = ["unshare", "--net", "--mount", "--uts", *([] if as_root else ["--user", "--map-root-user"]), "true"]
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip")):
        return None
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    return ("network namespaces, as root" if as_root else "user namespaces") if done.returncode == 0 else None


def _own_network() -> str | None:
    """The name CAP_NET_ADMIN if this process has that capability (bit 12, capabilities(7)). None otherwise."""
    effective = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return "CAP_NET_ADMIN" if effective and int(effective[1], 16) >> 12 & 1 else None


def _netem() -> str | None:
    """The name netem if the kernel has it, else None. The only way to find out is to add such a qdisc, in a temporary
    namespace."""
    if _links() is None:
        return None
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    done = subprocess.run(["unshare", "--net", *user, "sh", "-c", script], capture_output=True, timeout=20, check=False)
    return "netem" if done.returncode == 0 else None


def _shaper() -> str | None:
    return _netem() or (_program("iptables-legacy")() and "packet queue")


def _toxiproxy() -> str | None:
    return shutil.which("toxiproxy-server") if util.find_spec("toxiproxy") else None


def _etcd() -> str | None:
    """The path of an etcd with the v2 API, which torch's rendezvous needs. etcd 3.6 no longer has this API."""
    path = shutil.which("etcd")
    if path is None:
        return None
    done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=20, check=False)
    return path if "--enable-v2" in done.stdout + done.stderr else None


def _fuse() -> str | None:
    """The kernel's device and libfuse. None if one of them, or the Python binding of libfuse, is missing. Storage
    faults need all three."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or util.find_spec("mfusepy") is None:
        return None
    found = find_library("fuse3") or find_library("fuse")
    return f"/dev/fuse, {found}" if found else None


def _freezer() -> str | None:
    from torchaos.harness.rollback.cgroup_handles import freezer_for

    try:
        return str(Path(freezer_for(os.getpid(), "check").path).parent)
    except (OSError, ValueError):
        return None


def _library(name: str) -> Callable[[], str | None]:
    """A check for the library of this name in host/native_libraries.py. The check is a function that returns the
    library's path."""

    def find() -> str | None:
        from torchaos.harness.host import native_libraries

        try:
            return str(getattr(native_libraries, name).path())
        except UsageError:
            return None

    return find


def _gpu() -> str | None:
    found = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return f"{found} NVIDIA GPUs" if found else None


def _nccl() -> str | None:
    """The version of this Python's torch, if it is a build with NCCL. The job may use another torch."""
    version = installed(sys.executable).get("torch", "the job's own")
    return None if version.endswith("+cpu") else f"torch {version}"


def _pynvml() -> str | None:
    version = installed(sys.executable).get("nvidia-ml-py", "")
    return f"nvidia-ml-py {version}".strip() if util.find_spec("pynvml") else None


def _tracing() -> str | None:
    from torchaos.harness.monitoring.diagnosis.kernel_trace import missing

    return "bpftrace" if missing() is None else None


def _py_spy() -> str | None:
    from torchaos.harness.monitoring.diagnosis.live_job import find_py_spy

    return find_py_spy()


CHECKS: dict[str, Capability] = {
    "pidfd": Capability("signals that hit no other process", _pidfd, "needs Linux 5.3 and Python 3.9, or later"),
    "py_spy": Capability("stacks of the ranks, for hangs", _py_spy, "pip install 'torchaos[stacks]'"),
    "bpftrace": Capability(
        "observing waits in the kernel", _tracing, "run as root; apt-get install bpftrace util-linux"
    ),
    "proc": Capability("finding ranks and orphans", _own_processes, "mount /proc"),
    "agent": Capability(
        "faults at an exact step and phase", _agent, "needs Linux; the job must be launched, not attached to"
    ),
    "torchrun": Capability("starting jobs", _torchrun, "pip install torch, or put torchrun on the PATH"),
    "torch": Capability("reading checkpoints tensor by tensor", _torch, "pip install torch beside torchaos"),
    "links": Capability(
        "several nodes on this machine, each in a network namespace",
        _links,
        "run as root, or allow user namespaces (sysctl user.max_user_namespaces); apt-get install iproute2 util-linux",
    ),
    "own_network": Capability(
        "network faults in a pod",
        _own_network,
        "add NET_ADMIN to securityContext.capabilities of the container, and run it as root",
    ),
    "nft": Capability("dropping packets between nodes", _program("nft"), "apt-get install nftables"),
    "tc": Capability("limiting the rate between nodes", _program("tc"), "apt-get install iproute2"),
    "ss": Capability("inspecting and resetting connections", _program("ss"), "apt-get install iproute2"),
    "shaper": Capability(
        "delaying packets", _shaper, "needs a kernel with netem, or with NFQUEUE: apt-get install iptables"
    ),
    "toxiproxy": Capability(
        "faults of an endpoint that the job reaches by its address",
        _toxiproxy,
        "put toxiproxy-server on the PATH (Toxiproxy's releases have it), and pip install 'torchaos[proxy]'",
    ),
    "etcd": Capability(
        "nodes with their rendezvous in etcd",
        _etcd,
        "apt-get install etcd-server (etcd 3.4 or 3.5, which have the v2 API that torch speaks), or write "
        "--rdzv-backend c10d, or --rdzv-endpoint for a server of your own",
    ),
    "freezer": Capability("ranks that SIGKILL does not end", _freezer, "needs the cgroup freezer of version 1"),
    "nvtx": Capability("stalling NCCL calls", _library("NVTX"), "needs a C compiler: apt-get install gcc"),
    "nccl_net": Capability(
        "NCCL's connections, by a plug-in", _library("NCCL_NET"), "needs a C compiler: apt-get install gcc"
    ),
    "gpu": Capability("faults in NCCL's connections", _gpu, "run it on a machine with an NVIDIA GPU for each rank"),
    "nccl": Capability("faults in NCCL's connections", _nccl, "install a CUDA build of torch, which brings NCCL"),
    "nvml_overlay": Capability("simulated GPU health", _library("NVML"), "needs a C compiler: apt-get install gcc"),
    "pynvml": Capability(
        "samples of the GPUs, and the health agent of the ready GPU scenarios", _pynvml, "pip install 'torchaos[gpu]'"
    ),
    "dcgmi": Capability("values in a DCGM host engine", _program("dcgmi"), "install NVIDIA's datacenter-gpu-manager"),
    "fuse": Capability(
        "storage that fails, is slow or hangs",
        _fuse,
        "pip install 'torchaos[storage]', install libfuse (Debian: fuse3), and have /dev/fuse",
    ),
    "mount": Capability(
        "a small file system for the checkpoints",
        _mount,
        "run as root, or in namespaces of your own: unshare --user --map-root-user --mount torchaos run ...",
    ),
    "root": Capability("faults in networks, mounts and cgroups", _root, "run as root, or leave such scenarios out"),
}

NEEDED = ("pidfd", "proc", "agent", "torchrun")  # needed by every scenario that starts a job
