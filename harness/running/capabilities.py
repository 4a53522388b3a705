"""The capabilities of a machine that injectors and launchers may need. Each capability has a name, a check, and advice
for the case that it is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from getpass import getuser
from importlib import util
from pathlib import Path

from torchaos.harness.host.cluster_tools import ask
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.environment import installed, resolve_program


@dataclass(frozen=True)
class Finding:
    name: str
    present: bool
    detail: str
    remedy: str  # what to do if it is missing


@dataclass(frozen=True)
class _Check:
    used_for: str
    find: Callable[[], str | None]  # what was found, such as a path or version; None: nothing
    remedy: str


def check(name: str) -> Finding:
    """Checks a capability of this machine. Raises KeyError for an unknown name, which is a mistake in an injector."""
    wanted = CHECKS[name]
    found = wanted.find()
    detail = wanted.used_for if found is None else f"{wanted.used_for}; {found}"
    return Finding(name, found is not None, detail, wanted.remedy)


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


def _docker() -> str | None:
    from torchaos.harness.host.cluster_tools import EngineError, address, version

    try:
        return f"Docker {version(address())} at {address()}"
    except (EngineError, UsageError):
        return None


def _slurm() -> str | None:
    """The paths of Slurm's programs. None if a program is missing or no controller answers."""
    found = _program("srun", "salloc", "squeue", "scancel", "scontrol")()
    try:
        return found if found and " is UP" in ask(["scontrol", "ping"]) else None
    except OSError:
        return None


def _slurm_admin() -> str | None:
    """The role of this user in Slurm, if that role may change the states of nodes. None otherwise."""
    if shutil.which("scontrol") is None:
        return None
    try:
        config = ask(["scontrol", "show", "config"])
        owner = re.search(r"^SlurmUser\s*=\s*\S+\((\d+)\)", config, re.MULTILINE)
        if os.geteuid() == 0 or (owner and int(owner[1]) == os.geteuid()):
            return "root or Slurm's own user"
        level = ask(["sacctmgr", "--noheader", "--parsable2", "show", "user", getuser(), "format=adminlevel"]).strip()
    except (OSError, KeyError):
        return None
    return level if level in ("Operator", "Administrator") else None


def _freezer() -> str | None:
    from torchaos.harness.rollback.cgroup_handles import freezer_for

    try:
        return str(Path(freezer_for(os.getpid(), "check").path).parent)
    except (OSError, ValueError):
        return None


def _library(name: str) -> Callable[[], str | None]:
    """Where the library of this name in host/native_libraries.py is."""

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


CHECKS: dict[str, _Check] = {
    "pidfd": _Check("signals that hit no other process", _pidfd, "needs Linux 5.3 or later and Python 3.9 or later"),
    "py_spy": _Check("stacks of the ranks, for hangs", _py_spy, "pip install 'torchaos[stacks]'"),
    "bpftrace": _Check("observing waits in the kernel", _tracing, "run as root; apt-get install bpftrace util-linux"),
    "proc": _Check("finding ranks and orphans", _own_processes, "mount /proc"),
    "agent": _Check(
        "faults at an exact step and phase", _agent, "needs Linux; the job must be launched, not attached to"
    ),
    "torchrun": _Check("starting jobs", _torchrun, "pip install torch, or put torchrun on the PATH"),
    "torch": _Check("reading checkpoints tensor by tensor", _torch, "pip install torch beside torchaos"),
    "links": _Check(
        "several nodes on this machine, each in a network namespace",
        _links,
        "run as root, or allow user namespaces (sysctl user.max_user_namespaces); apt-get install iproute2 util-linux",
    ),
    "own_network": _Check(
        "network faults in a pod",
        _own_network,
        "add NET_ADMIN to securityContext.capabilities of the container, and run it as root",
    ),
    "nft": _Check("dropping packets between nodes", _program("nft"), "apt-get install nftables"),
    "tc": _Check("limiting the rate between nodes", _program("tc"), "apt-get install iproute2"),
    "ss": _Check("inspecting and resetting connections", _program("ss"), "apt-get install iproute2"),
    "shaper": _Check(
        "delaying packets", _shaper, "needs a kernel with netem, or with NFQUEUE: apt-get install iptables"
    ),
    "toxiproxy": _Check(
        "faults of an endpoint that the job reaches by its address",
        _toxiproxy,
        "put toxiproxy-server on the PATH (Toxiproxy's releases have it), and pip install 'torchaos[proxy]'",
    ),
    "etcd": _Check(
        "nodes with their rendezvous in etcd",
        _etcd,
        "apt-get install etcd-server (etcd 3.4 or 3.5, which have the v2 API that torch speaks), or write "
        "--rdzv-backend c10d, or --rdzv-endpoint for a server of your own",
    ),
    "docker": _Check(
        "nodes that are containers",
        _docker,
        "pip install 'torchaos[docker]', and start an engine: apt-get install docker.io; DOCKER_HOST=unix://... names "
        "another socket than the usual one",
    ),
    "slurm": _Check(
        "nodes of a Slurm cluster",
        _slurm,
        "run it where Slurm's programs are on the PATH and scontrol ping finds a controller, as on a login node",
    ),
    "slurm_admin": _Check(
        "states of a Slurm cluster's nodes",
        _slurm_admin,
        "needs a controller that answers, and a user who may change nodes (root, Slurm's own user, its operators and "
        "administrators): ask one of them, on a staging cluster",
    ),
    "ssh": _Check("nodes that are reached by ssh", _program("ssh"), "apt-get install openssh-client"),
    "kubectl": _Check(
        "nodes that are pods of a Kubernetes cluster",
        _program("kubectl"),
        "put kubectl on the PATH (https://kubernetes.io/docs/tasks/tools)",
    ),
    "freezer": _Check("ranks that SIGKILL does not end", _freezer, "needs the cgroup freezer of version 1"),
    "nvtx": _Check("stalling NCCL calls", _library("NVTX"), "needs a C compiler: apt-get install gcc"),
    "nccl_net": _Check(
        "NCCL's connections, by a plug-in", _library("NCCL_NET"), "needs a C compiler: apt-get install gcc"
    ),
    "gpu": _Check("faults in NCCL's connections", _gpu, "run it on a machine with an NVIDIA GPU for each rank"),
    "nccl": _Check("faults in NCCL's connections", _nccl, "install a CUDA build of torch, which brings NCCL"),
    "nvml_overlay": _Check("simulated GPU health", _library("NVML"), "needs a C compiler: apt-get install gcc"),
    "pynvml": _Check(
        "samples of the GPUs, and the health agent of the ready GPU scenarios", _pynvml, "pip install 'torchaos[gpu]'"
    ),
    "dcgmi": _Check("values in a DCGM host engine", _program("dcgmi"), "install NVIDIA's datacenter-gpu-manager"),
    "fuse": _Check(
        "storage that fails, is slow or hangs",
        _fuse,
        "pip install 'torchaos[storage]', install libfuse (Debian: fuse3), and have /dev/fuse",
    ),
    "mount": _Check(
        "a small file system for the checkpoints",
        _mount,
        "run as root, or in namespaces of your own: unshare --user --map-root-user --mount torchaos run ...",
    ),
    "root": _Check("faults in networks, mounts and cgroups", _root, "run as root, or leave such scenarios out"),
}

NEEDED = ("pidfd", "proc", "agent", "torchrun")  # needed by every scenario that starts a job
