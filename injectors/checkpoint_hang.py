"""checkpoint.hang: writing a checkpoint does not return, as on a dead file server. `for` is its duration."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.ranks import WaitingFault


@dataclass(frozen=True)
class CheckpointHang(WaitingFault):
    """Waits when the rank begins to save, before anything is written. A save that a trainer makes after step 30 belongs
    to step 31, so give `step: 31`."""

    name = "checkpoint.hang"
    phase = "checkpoint_write"
