"""proxy.timeout, .reset_peer, .slow_close, .limit_data, .down: an endpoint whose connections say nothing or break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torchaos.harness.agent.quantities import Count, Seconds
from torchaos.harness.mechanics.proxy.toxics import ProxyFault


@dataclass(frozen=True)
class Timeout(ProxyFault):
    """No answer comes any more; with `after`, the connection is closed so long after the fault, or after it was opened.
    Without it the connection stays open, until the fault is taken back."""

    endpoint: str
    after: Seconds = 0.0

    name: ClassVar[str] = "proxy.timeout"
    toxic: ClassVar[str] = "timeout"
    stream: ClassVar[str] = "downstream"
    proofs: ClassVar[tuple[str, ...]] = ("unanswered", "ended")

    def attributes(self) -> dict[str, Any]:
        return {"timeout": round(1e3 * self.after)}


@dataclass(frozen=True)
class ResetPeer(ProxyFault):
    """Connections are reset, `after` that long."""

    endpoint: str
    after: Seconds = 0.0

    name: ClassVar[str] = "proxy.reset_peer"
    toxic: ClassVar[str] = "reset_peer"
    stream: ClassVar[str] = "downstream"
    proofs: ClassVar[tuple[str, ...]] = ("ended",)

    def attributes(self) -> dict[str, Any]:
        return {"timeout": round(1e3 * self.after)}


@dataclass(frozen=True)
class SlowClose(ProxyFault):
    """That the endpoint has closed a connection is heard of only after `delay`."""

    endpoint: str
    delay: Seconds = 10.0

    name: ClassVar[str] = "proxy.slow_close"
    toxic: ClassVar[str] = "slow_close"
    stream: ClassVar[str] = "downstream"
    proofs: ClassVar[tuple[str, ...]] = ("ended",)

    def attributes(self) -> dict[str, Any]:
        return {"delay": round(1e3 * self.delay)}


@dataclass(frozen=True)
class LimitData(ProxyFault):
    """Each connection is closed once the endpoint has sent so many `bytes` over it."""

    endpoint: str
    bytes: Count = 1024

    name: ClassVar[str] = "proxy.limit_data"
    toxic: ClassVar[str] = "limit_data"
    stream: ClassVar[str] = "downstream"
    proofs: ClassVar[tuple[str, ...]] = ("ended",)

    def attributes(self) -> dict[str, Any]:
        return {"bytes": self.bytes}


@dataclass(frozen=True)
class Down(ProxyFault):
    """Open connections are closed, and new ones are refused."""

    endpoint: str

    name: ClassVar[str] = "proxy.down"
    stream: ClassVar[str] = "both"
    proofs: ClassVar[tuple[str, ...]] = ("ended",)
