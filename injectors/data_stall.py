"""data.stall: the data loader gives no batch, as if storage or a preprocessing service hangs. `for` is the duration."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.ranks import WaitingFault


@dataclass(frozen=True)
class DataStall(WaitingFault):
    """Waits when the training loop asks for its next batch, in the rank's own process. Worker processes continue."""

    name = "data.stall"
    phase = "data"
