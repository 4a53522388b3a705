"""proxy.latency, .bandwidth and .slicer: traffic to or from an endpoint of the job is late, slow, or in small
pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchaos.plugin import Count, Positive, Seconds
from torchaos.plugin.families.network import ProxyFault

_BACKLOG_MS = 100.0  # milliseconds; shorter waits may have another cause
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

    def effect(self, way: str, counts: Mapping[str, float]) -> str | None:
        held = counts.get(f"held_{way}_ms", 0)
        asked = 1e3 * max(0.0, self.latency - self.jitter)
        return f"what the job {way} was held back for at least {held:g} ms" if held >= max(1.0, asked / 2) else None


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

    def effect(self, way: str, counts: Mapping[str, float]) -> str | None:
        held, rate = counts.get(f"held_{way}_ms", 0), counts.get(f"held_{way}_kbs", 0.0)
        if held < _BACKLOG_MS or rate > 2 * self.rate:
            return None
        return f"what the job {way} had to wait, for at least {held:g} ms, and passed at {rate:g} KB/s"


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

    def effect(self, way: str, counts: Mapping[str, float]) -> str | None:
        pieces, size = counts.get(f"pieces_{way}", 0.0), counts.get(f"piece_{way}_bytes", 0.0)
        if pieces < 2 or size > 2 * self.size:
            return None
        return f"each piece of what the job {way} was divided into {pieces:g}, of {size:g} bytes on average"
