"""collective.stall: the rank does not enter a collective, and all others wait for it. `for` is the duration."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin.families.ranks import WaitingFault


@dataclass(frozen=True)
class Stall(WaitingFault):
    """Waits before the collective that the trigger names. The rank's other threads continue. Without `for` the fault
    lasts until the run ends, or until the job's own watchdog ends the rank."""

    name = "collective.stall"
    phase = "collective"
