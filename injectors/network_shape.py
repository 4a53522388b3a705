"""Packets that a node sends are changed on their way.

- network.delay: they arrive late, as over a long or busy route
- network.duplicate, network.reorder, network.corrupt: they arrive twice, in another order, or damaged"""

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


@dataclass(frozen=True)
class Duplicate(ShapedFault):
    """`percent` of the packets arrive twice."""

    percent: float = 10.0

    name = "network.duplicate"
    counter = "duplicates"
    words = "{n} segments of the job came twice"

    def shape(self) -> dict[str, float]:
        return {"duplicate": self.percent}

    def asked(self) -> dict[str, float]:
        return {"duplicate_percent": self.percent}


@dataclass(frozen=True)
class Reorder(ShapedFault):
    """`percent` of the packets overtake earlier packets, which arrive `delay` later."""

    percent: float = 25.0
    delay: Seconds = 0.01

    name = "network.reorder"
    counter = "out_of_order"
    words = "{n} segments of the job came out of order"

    def shape(self) -> dict[str, float]:
        return {"reorder": self.percent, "delay": 1e3 * self.delay}

    def asked(self) -> dict[str, float]:
        return {"delay_ms": 1e3 * self.delay}  # the median delay: most packets have it, and the others overtake them


@dataclass(frozen=True)
class Corrupt(ShapedFault):
    """In `percent` of the packets one bit is flipped. TCP's checksum finds such packets, and they are sent again."""

    percent: float = 5.0

    name = "network.corrupt"
    counter = "bad_checksums"
    words = "{n} segments of the job came with a bad checksum"

    def shape(self) -> dict[str, float]:
        return {"corrupt": self.percent}

    def asked(self) -> dict[str, float]:
        return {"loss_percent": self.percent}  # the receiving kernel drops a datagram whose checksum is bad
