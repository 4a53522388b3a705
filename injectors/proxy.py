"""The connections to an endpoint of the job, through a proxy.

- proxy.latency, proxy.bandwidth, proxy.slicer: traffic is late, slow, or in small pieces
- proxy.timeout, proxy.reset_peer, proxy.slow_close, proxy.limit_data, proxy.down: connections give no answer, or
  break"""

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


@dataclass(frozen=True)
class Timeout(ProxyFault):
    """The endpoint gives no answer. With `after`, each connection is closed after that many seconds, counted from the
    fault or, if later, from its opening. Without `after`, it stays open until the fault is undone."""

    endpoint: str
    after: Seconds = 0.0

    name = "proxy.timeout"
    toxic = "timeout"
    stream = "downstream"
    proofs = ("unanswered", "ended")

    def attributes(self) -> dict[str, Any]:
        return {"timeout": round(1e3 * self.after)}


@dataclass(frozen=True)
class ResetPeer(ProxyFault):
    """Connections are reset after `after` seconds."""

    endpoint: str
    after: Seconds = 0.0

    name = "proxy.reset_peer"
    toxic = "reset_peer"
    stream = "downstream"
    proofs = ("ended",)

    def attributes(self) -> dict[str, Any]:
        return {"timeout": round(1e3 * self.after)}


@dataclass(frozen=True)
class SlowClose(ProxyFault):
    """When the endpoint closes a connection, the job's side is closed `delay` seconds later."""

    endpoint: str
    delay: Seconds = 10.0

    name = "proxy.slow_close"
    toxic = "slow_close"
    stream = "downstream"

    def attributes(self) -> dict[str, Any]:
        return {"delay": round(1e3 * self.delay)}

    def effect(self, way: str, counts: Mapping[str, float]) -> str | None:
        open_ms = counts.get("half_closed_ms", 0)
        if open_ms < max(1.0, 1e3 * self.delay / 2):
            return None
        return f"a connection of the job was still open {open_ms:g} ms after the endpoint had closed it"


@dataclass(frozen=True)
class LimitData(ProxyFault):
    """Each connection is closed after the endpoint has sent `bytes` bytes over it."""

    endpoint: str
    bytes: Count = 1024

    name = "proxy.limit_data"
    toxic = "limit_data"
    stream = "downstream"
    proofs = ("ended",)

    def attributes(self) -> dict[str, Any]:
        return {"bytes": self.bytes}


@dataclass(frozen=True)
class Down(ProxyFault):
    """Open connections are closed, and new ones are refused."""

    endpoint: str

    name = "proxy.down"
    stream = "both"
    proofs = ("ended",)
