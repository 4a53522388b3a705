"""network.delay: packets that a node sends arrive late, as over a long or busy route."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Seconds
from torchaos.plugin.families.network import ShapedFault


@dataclass(frozen=True)
class Delay(ShapedFault):
    """Each packet arrives `delay` later, plus or minus `jitter`, in the order of sending."""

    delay: Seconds = 0.05
    jitter: Seconds = 0.0

    name = "network.delay"
    counter = "rtt_ms"

    @property
    def least(self) -> float:
        """The round trip, in ms, from which on the fault counts as felt: 80 % of the smallest delay that it adds to a
        round trip, at least 1 ms."""
        return max(1.0, 800 * (self.delay - self.jitter))

    def shape(self) -> dict[str, float]:
        return {"delay": 1e3 * self.delay, "jitter": 1e3 * self.jitter}

    def asked(self) -> dict[str, float]:
        return {"delay_ms": 1e3 * self.delay, "loss_percent": 0.0}
