"""collective.stall: the rank does not enter a collective, and all others wait for it. `for` says how long."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import WaitingFault


@dataclass(frozen=True)
class Stall(WaitingFault):
    """Waits in front of the one collective that the trigger names; its other threads run on. Without `for` it lasts
    until the run ends or the job's own watchdog ends the rank."""

    name = "collective.stall"
    phase = "collective"
