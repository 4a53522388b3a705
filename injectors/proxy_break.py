"""proxy.timeout, .reset_peer, .slow_close, .limit_data, .down: connections to an endpoint give no answer, or break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Count, Seconds
from torchaos.plugin.families.network import ProxyFault


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
