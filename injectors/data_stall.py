"""data.stall: the data loader gives no batch, as when storage or a preprocessing service hangs. `for` says how long."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import WaitingFault


@dataclass(frozen=True)
class DataStall(WaitingFault):
    """Waits where the training loop asks for its next batch, in the rank's own process; worker processes run on."""

    name = "data.stall"
    phase = "data"
