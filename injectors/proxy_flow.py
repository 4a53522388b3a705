"""proxy.latency, .bandwidth and .slicer: traffic to or from an endpoint of the job is late, slow, or in small
pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchaos.plugin import Count, Positive, ProxyFault, Seconds

Stream = Literal["both", "upstream", "downstream"]  # upstream: data that the job sends; downstream: data that it gets


@dataclass(frozen=True)
class Latency(ProxyFault):
    """All traffic arrives `latency` later, plus or minus `jitter`."""

    endpoint: str
    latency: Seconds = 0.5
    jitter: Seconds = 0.0
    stream: Stream = "both"

    name = "proxy.latency"
    toxic = "latency"

    def attributes(self) -> dict[str, Any]:
        return {"latency": round(1e3 * self.latency), "jitter": round(1e3 * self.jitter)}


@dataclass(frozen=True)
class Bandwidth(ProxyFault):
    """Each connection gets at most `rate` KB/s."""

    endpoint: str
    rate: Positive = 100.0
    stream: Stream = "both"

    name = "proxy.bandwidth"
    toxic = "bandwidth"

    def attributes(self) -> dict[str, Any]:
        return {"rate": max(1, round(self.rate))}


@dataclass(frozen=True)
class Slicer(ProxyFault):
    """Data is passed on in slices of about `size` bytes, with `delay` between them."""

    endpoint: str
    size: Count = 64
    delay: Seconds = 0.0
    stream: Stream = "both"

    name = "proxy.slicer"
    toxic = "slicer"

    def attributes(self) -> dict[str, Any]:
        return {"average_size": self.size, "size_variation": self.size // 4, "delay": round(1e6 * self.delay)}
