"""A call of the training loop does not return. `for` is the duration.

- checkpoint.hang: writing a checkpoint, as on a dead file server
- collective.stall: the rank does not enter a collective, and all others wait for it
- data.stall: the data loader gives no batch, as if storage or a preprocessing service hangs"""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.ranks import WaitingFault


@dataclass(frozen=True)
class CheckpointHang(WaitingFault):
    """Waits when the rank begins to save, before anything is written. A save that a trainer makes after step 30 belongs
    to step 31, so give `step: 31`."""

    name = "checkpoint.hang"
    phase = "checkpoint_write"


@dataclass(frozen=True)
class Stall(WaitingFault):
    """Waits before the collective that the trigger names. The rank's other threads continue. Without `for` the fault
    lasts until the run ends, or until the job's own watchdog ends the rank."""

    name = "collective.stall"
    phase = "collective"


@dataclass(frozen=True)
class DataStall(WaitingFault):
    """Waits when the training loop asks for its next batch, in the rank's own process. Worker processes continue."""

    name = "data.stall"
    phase = "data"
