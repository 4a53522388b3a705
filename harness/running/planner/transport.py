"""Predicts the transport of the job's collectives before the job starts: a fault in TCP affects only TCP. The order is
NCCL's (its user guide, "Environment Variables"): NCCL_NET, NCCL_IB_DISABLE, then the hardware of the machine. Gloo and
the rendezvous always use TCP."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

# Gives each attempt of torchrun a store of its own, without the gloo addresses of the attempt before.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Machine:
    """The hardware and libraries of a machine that collectives could use."""

    gpus: int = 0
    adapters: tuple[str, ...] = ()  # InfiniBand or RoCE
    plugin: str | None = None  # a network plug-in of NCCL

    @classmethod
    def this(cls) -> Machine:
        adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        return cls(gpus, tuple(adapters), find_library("nccl-net") if gpus else None)


@dataclass(frozen=True)
class Transport:
    """The transport of a job's collectives, and why it is used."""

    name: str  # such as "NCCL over InfiniBand"
    why: str
    instead: str = ""  # how the user can switch the job to TCP; empty if it uses TCP

    @property
    def is_tcp(self) -> bool:
        return not self.instead


def transport_of(env: Mapping[str, str], nodes: int, machine: Machine) -> Transport:
    """The transport of a job on this number of nodes. `env`: the job's complete environment."""
    if nodes < 2:
        return Transport(
            "loopback and shared memory", "all ranks are on one node", "let the job run on two nodes or more"
        )
    if not machine.gpus or env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Transport("gloo over TCP", "there is no GPU for NCCL")
    if "NCCL_HOSTID" in env:
        return Transport(
            "NVLink and shared memory", "NCCL_HOSTID makes NCCL take all nodes for one machine", "remove NCCL_HOSTID"
        )
    sockets = 'write env: {NCCL_NET: Socket, NCCL_IB_DISABLE: "1"}'
    net = env.get("NCCL_NET", "").lower()
    if net == "socket":
        return Transport("NCCL over TCP", "NCCL_NET is Socket")
    if net and net != "ib":
        return Transport(f"NCCL over {env['NCCL_NET']}", "NCCL_NET says so", sockets)
    if machine.plugin and env.get("NCCL_NET_PLUGIN", "").lower() != "none" and net != "ib":
        return Transport("NCCL over a plugin's network", f"{machine.plugin} is installed", sockets)
    if machine.adapters and env.get("NCCL_IB_DISABLE", "0") == "0":
        return Transport("NCCL over InfiniBand or RoCE", f"there is {', '.join(machine.adapters)}", sockets)
    return Transport("NCCL over TCP", "there is no other network that NCCL would take")


def kept_from_plugin(env: Mapping[str, str], nodes: int) -> str | None:
    """Why the job's NCCL would not use the plug-in that the harness names, and what to write instead. None if it would
    use the plug-in."""
    if set_ := next((name for name in ("NCCL_NET", "NCCL_NET_PLUGIN") if env.get(name)), None):
        return (
            f"the job's environment has {set_}={env[set_]}, and the fault needs a network plug-in of torchaos, which "
            f"sends over TCP; remove {set_}"
        )
    switches = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if env.get(name) != "1"]
    if nodes < 2 and switches:
        wanted = ", ".join(f'{name}: "1"' for name in switches)
        return f"on one node NCCL sends through NVLink or shared memory; write env: {{{wanted}}}"
    return None
