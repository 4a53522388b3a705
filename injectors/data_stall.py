"""data.stall: the data loader gives no batch, as when storage or a preprocessing service hangs. `for` says how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchaos.injectors.waiting import WaitingFault


@dataclass(frozen=True)
class DataStall(WaitingFault):
    """Waits where the training loop asks for its next batch, in the rank's own process; worker processes run on."""

    name: ClassVar[str] = "data.stall"
    phase: ClassVar[str | None] = "data"
