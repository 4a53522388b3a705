"""network.partition: nodes that no longer hear each other, as behind a broken switch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchaos.harness.mechanics.network.cuts import CutFault


@dataclass(frozen=True)
class Partition(CutFault):
    """Cuts the target nodes off from `peers`, by default from all others. `direction`, as the target sees it: `out`
    drops what it sends. With `ports`, only TCP from or to these, such as the rendezvous store's."""

    peers: list[int] = field(default_factory=list)
    direction: Literal["both", "out", "in"] = "both"
    ports: list[int] = field(default_factory=list)

    name: ClassVar[str] = "network.partition"
    percent: ClassVar[float] = 100.0
