"""network.loss: a share of all packets between nodes is lost, as on a bad cable."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchaos.plugin.families.network import PacketDropFault


@dataclass(frozen=True)
class Loss(PacketDropFault):
    """Drops `percent` of the packets between the target nodes and `peers` (by default all other nodes), chosen at
    random, in both directions."""

    percent: float = 10.0
    peers: list[int] = field(default_factory=list)

    name = "network.loss"
    direction = "both"
    ports = ()
