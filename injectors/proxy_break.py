"""proxy.timeout, .reset_peer, .slow_close, .limit_data, .down: an endpoint whose connections say nothing or break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Count, ProxyFault, Seconds


@dataclass(frozen=True)
class Timeout(ProxyFault):
    """No answer comes any more; with `after`, the connection is closed so long after the fault, or after it was opened.
    Without it the connection stays open, until the fault is taken back."""

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
    """Connections are reset, `after` that long."""

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
    """That the endpoint has closed a connection is heard of only after `delay`."""

    endpoint: str
    delay: Seconds = 10.0

    name = "proxy.slow_close"
    toxic = "slow_close"
    stream = "downstream"
    proofs = ("ended",)

    def attributes(self) -> dict[str, Any]:
        return {"delay": round(1e3 * self.delay)}


@dataclass(frozen=True)
class LimitData(ProxyFault):
    """Each connection is closed once the endpoint has sent so many `bytes` over it."""

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
