"""Packets between nodes are lost.

- network.partition: all of them, as behind a broken switch
- network.loss: a share of them, as on a bad cable"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchaos.plugin.families.network import PacketDropFault


@dataclass(frozen=True)
class Partition(PacketDropFault):
    """Cuts the target nodes off from `peers` (by default all other nodes). `direction` is seen from the target: `out`
    drops the packets that the target sends. With `ports`, only TCP from or to these ports is dropped, for example the
    port of the rendezvous store."""

    peers: list[int] = field(default_factory=list)
    direction: Literal["both", "out", "in"] = "both"
    ports: list[int] = field(default_factory=list)

    name = "network.partition"
    percent = 100.0


@dataclass(frozen=True)
class Loss(PacketDropFault):
    """Drops `percent` of the packets between the target nodes and `peers` (by default all other nodes), chosen at
    random, in both directions."""

    percent: float = 10.0
    peers: list[int] = field(default_factory=list)

    name = "network.loss"
    direction = "both"
    ports = ()
