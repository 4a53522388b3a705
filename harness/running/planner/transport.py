"""What the job's collectives go over, as far as it shows before the job is started: a fault in TCP reaches only TCP.

By the order in which NCCL looks (its user guide, "Environment Variables"): NCCL_NET, NCCL_IB_DISABLE, what the machine
has. Gloo and the rendezvous go over TCP, whatever it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What there is that collectives could go over."""

    gpus: int = 0
    adapters: tuple[str, ...] = ()  # InfiniBand, RoCE
    plugin: str | None = None  # of NCCL's, for another network

    @classmethod
    def this(cls) -> Machine:
        adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        return cls(gpus, tuple(adapters), find_library("nccl-net") if gpus else None)


@dataclass(frozen=True)
class Transport:
    name: str  # such as "NCCL over InfiniBand"
    why: str
    instead: str = ""  # what makes it TCP; empty: it is

    @property
    def is_tcp(self) -> bool:
        return not self.instead


def transport_of(env: Mapping[str, str], nodes: int, machine: Machine) -> Transport:
    """`env`: the job's environment, complete. Pure."""
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
