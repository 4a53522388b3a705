"""checkpoint.hang: writing a checkpoint does not come back, as on a dead file server. `for` says how long."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import WaitingFault


@dataclass(frozen=True)
class CheckpointHang(WaitingFault):
    """Waits where the rank begins to save, before anything is written. A save "after step 30" is made in step 31."""

    name = "checkpoint.hang"
    phase = "checkpoint_write"
