"""network.partition: nodes can't reach each other, as behind a broken switch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchaos.plugin import CutFault


@dataclass(frozen=True)
class Partition(CutFault):
    """Cuts the target nodes off from `peers`, by default from all others. `direction` is from the target's view: `out`
    drops what the target sends. With `ports`, only TCP from or to these ports is dropped, such as the rendezvous
    store's."""

    peers: list[int] = field(default_factory=list)
    direction: Literal["both", "out", "in"] = "both"
    ports: list[int] = field(default_factory=list)

    name = "network.partition"
    percent = 100.0
