"""The network of this pod, as faults see it: its own link, and the addresses of the other pods."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from torchaos.harness.contracts import ChaosError
from torchaos.harness.machine.netspace import Space
from torchaos.harness.mechanics.network.link import Link

_HERE, _ELSEWHERE = Space(0, 0), Space(-1, 0)  # the network of a process that does not exist is never touched


def links_of_pods(addresses: Sequence[str], node: int, mark: str) -> list[Link]:
    """The link of each pod, of which faults can change only that of this pod, the pod `node`. `addresses`: the IP
    addresses of all pods. `mark`: the helper processes of faults get it. Raises ChaosError if this pod has no
    network."""
    device = _device()
    spaces = [_HERE if index == node else _ELSEWHERE for index in range(len(addresses))]
    return [
        Link(space, space, device, device, address, f"n{index}", "/etc/hosts", mark)
        for index, (space, address) in enumerate(zip(spaces, addresses, strict=True))
    ]


def _device() -> str:
    """The device of the default route (route(5)); without such a route, the first device but the loopback."""
    routes = [line.split() for line in Path("/proc/self/net/route").read_text().splitlines()[1:]]
    default = [fields[0] for fields in routes if fields[1] == fields[7] == "00000000"]
    others = [name for _number, name in socket.if_nameindex() if name != "lo"]
    if not default and not others:
        raise ChaosError("this pod has no network device that a fault could change")
    return (default or others)[0]
