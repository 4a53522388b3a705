"""network.loss: a share of all packets between nodes is lost, as on a bad cable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torchaos.harness.mechanics.network.cuts import CutFault


@dataclass(frozen=True)
class Loss(CutFault):
    """`percent` of the packets between the target nodes and `peers` (by default all others) are lost, drawn for each,
    in both directions."""

    percent: float = 10.0
    peers: list[int] = field(default_factory=list)

    name: ClassVar[str] = "network.loss"
    direction: ClassVar[str] = "both"
    ports: ClassVar[tuple[int, ...]] = ()
